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
    """Return the device of the first tensor inside, or None."""
    for each in value.values() if type(value) is dict else ():
        if isinstance(each, torch.Tensor):
            return each.device
        if each is not None:
            break
    return next((tensor.device for tensor in tensors_in(value)), None)


class Parameters(inspect.Signature):
    """Signature of a forward with a fast ``bind``: a fifth of the time of ``inspect.Signature.bind`` for most calls."""

    @cached_property
    def _named_parameters(self) -> tuple[list[str], list[Any], int, bool]:
        """Names and defaults of named parameters, how many are positional, and whether there is a ``**kwargs``.

        The count is -1 if there are positional-only parameters or ``*args``: then ``bind`` is needed.
        """
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
        """Return the result of ``argument_values``; None for calls that need ``bind``, such as those with ``*args``."""
        names, defaults, positional, others = self._named_parameters
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
    """Return the signature of a module's own forward without annotations, which may not be copyable or picklable."""
    return Parameters([p.replace(annotation=p.empty) for p in forward_signature(module).parameters.values()])


def argument_values(parameters: Parameters, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each argument by name, defaults included. Those of ``**kwargs`` have their own names.

    Raises:
        TypeError: the arguments do not fit the signature.
    """
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
    """One call of a traced module: its arguments and the mode it runs in; ``parameters`` is the signature of the forward."""

    def __init__(self, parameters: Parameters, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        self.training, self.autocast = module.training, mode_regions.autocast_state()
        self.values = argument_values(parameters, args, kwargs)
        self.given = {name: fingerprint(value) for name, value in self.values.items()}
        self.changed: dict[str, tuple[Any, ...] | None] = {}
        """Inlined modules that changed since the first trace, see ``Variants._changed``."""

    @cached_property
    def key(self) -> Any:
        """Key that is equal for calls in the same mode whose arguments no graph can tell apart."""
        return self.training, self.autocast, _hashable(self.changed), _hashable(self.given)


class InputCheck(Protocol):
    """Check of the inputs of a graph without a forward behind it."""

    device: torch.device | None

    def check(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the graph's inputs.

        Raises:
            TraceError: the graph does not serve these arguments.
        """


@dataclass
class Guard:
    """Conditions that a call must meet to be served by a graph.

    Args:
        parameters: Signature of the forward.
        training: The module's mode.
        autocast: The autocast state of the call.
        traced: Fingerprint of every argument.
        placeholders: Arguments with tensors or mutable objects: the graph's inputs. The others are part of the graph.
        device: Device of its tensors.
        attributes: Attributes that the forward read from its modules.
        expectations: Answers that the forward got from its inputs and from torch's modes.
        checks_inside: True if the graph checks further answers while it runs, and so may fail midway.
    """

    parameters: Parameters
    training: bool
    autocast: mode_regions.ModeState
    traced: dict[str, Any] = field(default_factory=dict)
    placeholders: tuple[str, ...] = ()
    device: torch.device | None = None
    attributes: Attributes | None = field(default=None, compare=False)
    expectations: tuple[Expectation, ...] = field(default=(), compare=False)
    checks_inside: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Guard:
        parameters = plain_signature(module)
        call = Call(parameters, module, args, kwargs)
        placeholders = tuple(name for name, value in call.values.items() if is_input(value))
        return cls(parameters, call.training, call.autocast, call.given, placeholders, device_of(call.values))

    def expect(self, graph: fx.Graph) -> None:
        """Record the graph's expectations of its inputs and of torch's modes."""
        nodes = graph.find_nodes(op="call_function", target=expect)
        for node in nodes:
            answer, name, *asked = node.args
            of = asked.pop(0) if asked else None
            nodes_inside = any(isinstance(each, fx.Node) for each in [*asked, *node.kwargs.values()])
            if not nodes_inside and (of is None or (isinstance(of, fx.Node) and of.op == "placeholder")):
                source = None if of is None else str(of.target)
                self.expectations += (Expectation(answer, str(name), source, tuple(asked), dict(node.kwargs)),)
        self.checks_inside = len(nodes) > len(self.expectations)

    def share_attributes(self, other: Guard | None, module: nn.Module) -> None:
        """Use the attribute record of another guard, if that has the same attributes and they have not changed."""
        known = other.attributes if other is not None else None
        if self.attributes is not None and known is not None and self.attributes.names == known.names:
            self.attributes = known if known.find_change(module) is None else self.attributes

    def problem(self, module: nn.Module, call: Call) -> str | None:
        """Return why the graph cannot serve a call, or None."""
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
        changed = self.attributes.find_change(module) if self.attributes is not None else None
        return changed and f"attribute {changed}"


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _hashable(part)) for key, part in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, tuple) else value
