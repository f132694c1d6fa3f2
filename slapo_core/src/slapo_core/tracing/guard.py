"""What a forward was traced for: a call that differs in it is an error, not other numbers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import TraceError
from . import regions
from .attributes import Attributes
from .structures import difference, fingerprint, is_input, tensors


def device_of(value: Any) -> torch.device | None:
    """Device of the first tensor inside."""
    return next((tensor.device for tensor in tensors(value)), None)


@dataclass
class Guard:
    """What a forward was traced for.

    Args:
        parameters: Its signature.
        training: The module's mode.
        autocast: The autocast it ran under.
        traced: Fingerprint of every argument.
        placeholders: Arguments that hold tensors or objects: the graph's inputs. The others are part of the graph.
        device: Where its tensors were.
        refuse: The module was called in ways that one graph cannot stand for.
        attributes: What the forward read from its modules.
    """

    parameters: inspect.Signature
    training: bool
    autocast: regions.State
    traced: dict[str, Any] = field(default_factory=dict)
    placeholders: tuple[str, ...] = ()
    device: torch.device | None = None
    refuse: bool = field(default=False, compare=False)
    attributes: Attributes | None = field(default=None, compare=False)

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Guard:
        """The guard of a call."""
        known = getattr(module, "guard", None)  # a traced module's forward takes anything
        signature = known.parameters if isinstance(known, Guard) else inspect.signature(module.forward)
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        guard = cls(inspect.Signature(plain), module.training, regions.autocast_state())
        values = guard.values(args, kwargs)
        guard.device = device_of(values)
        guard.traced = {name: fingerprint(value) for name, value in values.items()}
        guard.placeholders = tuple(name for name, value in values.items() if is_input(value))
        return guard

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Argument name to value, defaults included; those of ``**kwargs`` under their own names."""
        bound = self.parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        values: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            several = self.parameters.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            values.update(value if several else {name: value})
        return values

    def check(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the graph's inputs.

        Raises:
            TraceError: The call is not the one that was traced.
        """
        if module.training != self.training:
            now, then = ("train", "eval") if module.training else ("eval", "train")
            raise TraceError(f"the module is in {now} mode but was traced in {then} mode; run it in {then} mode or trace again")
        if (autocast := regions.autocast_state()) != self.autocast:
            what = f"the call is under autocast {autocast or 'none'}, traced under {self.autocast or 'none'}"
            raise TraceError(f"{what}; trace it again under this autocast")
        if self.attributes is not None:
            self.attributes.check(module)
        values = self.values(args, kwargs)
        given = {name: fingerprint(value) for name, value in values.items()}
        if given != self.traced:
            none = fingerprint(None)
            for name in [*self.traced, *given]:
                old, new = self.traced.get(name, none), given.get(name, none)
                if old != new:
                    raise TraceError(f"{difference(old, new, name)}; trace the module again with inputs like these")
        return {name: values[name] for name in self.placeholders}
