"""Optimizers nested in an optimizer: wrappers and composites hold them in attributes."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

Optimizer = torch.optim.Optimizer

_OPAQUE = (torch.Tensor, nn.Module, dist.ProcessGroup, DeviceMesh, type, types.FunctionType, types.MethodType, types.ModuleType)
_OWN = ("state", "param_groups", "defaults")
_DEEPEST = 5


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer and its nested optimizers in attributes, containers or plain objects, each once."""
    return list(named_optimizers_in(optimizer).values())


def named_optimizers_in(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizer under ``""`` and its nested optimizers by path, e.g. ``"parts.0"``, each once."""
    found: dict[str, Optimizer] = {}
    seen: set[int] = set()

    def visit(value: Any, place: tuple[str, ...], depth: int) -> None:
        if id(value) in seen or depth > _DEEPEST or isinstance(value, _OPAQUE):
            return
        seen.add(id(value))
        if isinstance(value, Optimizer):
            found[".".join(place)] = value
            depth = 0
        for name, each in _inner_values(value):
            visit(each, (*place, name), depth + 1)

    visit(optimizer, (), 0)
    return found


def groups_in(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer and its nested optimizers, each once."""
    groups = (group for each in optimizers_in(optimizer) for group in each.param_groups)
    return list({id(group): group for group in groups}.values())


def parameters_in(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer and its nested optimizers step, each once."""
    held = (parameter for group in groups_in(optimizer) for parameter in group["params"])
    return list({id(parameter): parameter for parameter in held}.values())


def referenced_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters in groups and in list attributes of an optimizer and its nested optimizers, each once."""
    lists = (value for each in optimizers_in(optimizer) for value in vars(each).values() if isinstance(value, list))
    others = (item for value in lists for item in value if isinstance(item, nn.Parameter))
    return list({id(parameter): parameter for parameter in (*parameters_in(optimizer), *others)}.values())


def _inner_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Iterate by name over the values in a value that may hold an optimizer."""
    if isinstance(value, list | tuple):
        yield from ((str(number), each) for number, each in enumerate(value))
    elif isinstance(value, dict):
        yield from ((str(key) if isinstance(key, str | int) else "?", each) for key, each in value.items())
    elif hasattr(value, "__dict__"):
        own = _OWN if isinstance(value, Optimizer) else ()
        yield from ((name, each) for name, each in vars(value).items() if name not in own)
