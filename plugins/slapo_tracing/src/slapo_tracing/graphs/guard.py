"""Guards: conditions that a call must meet to be served by a graph."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import fx, nn

from slapo_core import forward_signature

from ..nodes import mode_regions
from ..nodes.graph_functions import Expectation, expect
from ..nodes.nested_values import difference, fingerprint, is_input, tensors_in
from ..recording.attribute_reads import Attributes


def device_of(value: Any) -> torch.device | None:
    """Return the device of the first tensor inside."""
    for each in value.values() if type(value) is dict else ():
        if isinstance(each, torch.Tensor):
            return each.device
        if each is not None:
            break
    return next((tensor.device for tensor in tensors_in(value)), None)


class Parameters(inspect.Signature):
    """The parameters of a forward, which binds the arguments of most calls in a fifth of the time that ``bind`` takes."""

    @cached_property
    def _named(self) -> tuple[list[str], list[Any], int, bool]:
        """Names and defaults of those that have names, how many can be given by position, and whether any others are taken."""
        each = list(self.parameters.values())
        named = [p for p in each if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return (
            [p.name for p in named],
            [p.default for p in named],
            sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in named) if len(each) - len(named) == self._takes_others else -1,
            self._takes_others,
        )

    @property
    def _takes_others(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    def values_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """See ``argument_values``; None where it takes ``bind`` to know, as for ``*args`` and wrong calls."""
        names, defaults, positional, others = self._named
        if len(args) > positional:
            return None
        values = dict(zip(names, args, strict=False))
        found = 0
        for name, default in zip(names[len(args) :], defaults[len(args) :], strict=True):
            if name in kwargs:
                values[name] = kwargs[name]
                found += 1
            elif default is inspect.Parameter.empty:
                return None
            else:
                values[name] = default
        if found < len(kwargs):
            if not others or not kwargs.keys().isdisjoint(names[: len(args)]):
                return None
            values.update((name, value) for name, value in kwargs.items() if name not in values)
        return values


def plain_signature(module: nn.Module) -> Parameters:
    """The parameters of a module's own forward without annotations, which may not be copied or pickled."""
    return Parameters([p.replace(annotation=p.empty) for p in forward_signature(module).parameters.values()])


def argument_values(parameters: Parameters, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Argument name to value, defaults included; those of ``**kwargs`` under their own names."""
    if (values := parameters.values_of(args, kwargs)) is not None:
        return values
    bound = parameters.bind(*args, **kwargs)
    bound.apply_defaults()
    values = {}
    for name, value in bound.arguments.items():
        several = parameters.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        values.update(value if several else {name: value})
    return values


class Call:
    """One call of a traced module: its arguments and the mode it runs in.

    Args:
        parameters: Signature of the forward.
        module: The module.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    def __init__(self, parameters: Parameters, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        self.training, self.autocast = module.training, mode_regions.autocast_state()
        self.values = argument_values(parameters, args, kwargs)
        self.given = {name: fingerprint(value) for name, value in self.values.items()}
        self.changed: dict[str, tuple[Any, ...] | None] = {}
        """See ``Variants``: modules inside that are called otherwise than in the first graph."""

    @cached_property
    def key(self) -> Any:
        """Equal for calls with the same arguments, as far as a graph can tell, in the same mode."""
        return self.training, self.autocast, _hashable(self.changed), _hashable(self.given)


class InputCheck(Protocol):
    """Checks the inputs of a graph that no other forward stands behind."""

    device: torch.device | None

    def check(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the graph's inputs, or a ``TraceError``."""


@dataclass
class Guard:
    """Conditions that a call must meet to be served by a graph.

    Args:
        parameters: Signature of the forward.
        training: The module's mode.
        autocast: The autocast it ran under.
        traced: Fingerprint of every argument.
        placeholders: Arguments that hold tensors or objects: the graph's inputs. The others are part of the graph.
        device: Where its tensors were.
        attributes: What the forward read from its modules.
        expectations: What it asked of its inputs and of torch's modes.
        asks_inside: Whether it asked something else: in the middle the graph may find that it is not good for the call.
    """

    parameters: Parameters
    training: bool
    autocast: mode_regions.ModeState
    traced: dict[str, Any] = field(default_factory=dict)
    placeholders: tuple[str, ...] = ()
    device: torch.device | None = None
    attributes: Attributes | None = field(default=None, compare=False)
    expectations: tuple[Expectation, ...] = field(default=(), compare=False)
    asks_inside: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Guard:
        """Return the guard of a call."""
        parameters = plain_signature(module)
        call = Call(parameters, module, args, kwargs)
        placeholders = tuple(name for name, value in call.values.items() if is_input(value))
        return cls(parameters, call.training, call.autocast, call.given, placeholders, device_of(call.values))

    def expect(self, graph: fx.Graph) -> None:
        """Note what the graph expects of its inputs and of torch's modes."""
        nodes = graph.find_nodes(op="call_function", target=expect)
        for node in nodes:
            answer, name, *asked = node.args
            of = asked.pop(0) if asked else None
            nodes_inside = any(isinstance(each, fx.Node) for each in [*asked, *node.kwargs.values()])
            if not nodes_inside and (of is None or (isinstance(of, fx.Node) and of.op == "placeholder")):
                source = None if of is None else str(of.target)
                self.expectations += (Expectation(answer, str(name), source, tuple(asked), dict(node.kwargs)),)
        self.asks_inside = len(nodes) > len(self.expectations)

    def share_attributes(self, other: Guard | None, module: nn.Module) -> None:
        """Watch the attributes by the record of another guard, where that watches the same ones and they have not changed."""
        known = other.attributes if other is not None else None
        if self.attributes is not None and known is not None and self.attributes.names == known.names:
            self.attributes = known if known.changed(module) is None else self.attributes

    def problem(self, module: nn.Module, call: Call) -> str | None:
        """Return why the graph cannot serve a call; None where it can."""
        if call.training != self.training:
            now, then = ("train", "eval") if call.training else ("eval", "train")
            return f"the module is in {now} mode but was traced in {then} mode"
        if call.autocast != self.autocast:
            return f"the call is under autocast {call.autocast or 'none'}, traced under {self.autocast or 'none'}"
        if call.given != self.traced:
            none = fingerprint(None)
            for name in [*self.traced, *call.given]:
                old, new = self.traced.get(name, none), call.given.get(name, none)
                if old != new:
                    return difference(old, new, name)
        for expectation in self.expectations:
            if found := expectation.problem(call.values):
                return found
        changed = self.attributes.changed(module) if self.attributes is not None else None
        return changed and f"attribute {changed}"


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _hashable(part)) for key, part in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, tuple) else value
