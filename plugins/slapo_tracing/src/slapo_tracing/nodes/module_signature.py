"""Facts that decide the work of a module, for blocks of a model that are alike."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import is_dataclass

import torch
from torch import nn

from .forward_wrapping import forward_wrappers, own_forward

_NUMBERS = re.compile(r"(^|_)(idx|index|id|number|path|name)$")
_PLAIN = (bool, int, float, str, torch.dtype, type(None))


def module_signature(module: nn.Module) -> Hashable:
    """Return what decides the work and memory of a module: equal for layers that differ in their weights and numbers."""
    return tuple(map(_facts, module.modules()))


def plain_attributes(state: Mapping[str, object]) -> dict[str, object]:
    """Return the plain attributes that decide what a module runs: all but numbers and paths of the layer itself.

    Args:
        state: Attributes, as ``vars`` returns them.
    """
    return {name: value for name, value in state.items() if isinstance(value, _PLAIN) and not _NUMBERS.search(name)}


def _facts(module: nn.Module) -> Hashable:
    tensors = [
        (name, each.shape, each.dtype, each.requires_grad)
        for name, each in (*module._parameters.items(), *module._buffers.items())
        if each is not None
    ]
    tables = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    called = [hook for table in tables for hook in table.values()]
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    settings = plain_attributes(vars(module)).items()
    return (kind, *settings, *tensors, *map(_code, [own_forward(module), *forward_wrappers(module), *called]))


def _code(called: object) -> Hashable:
    """Return what a hook or wrapper does, without the tensors and modules it is bound to."""
    inner = getattr(called, "func", called)  # of a partial
    state = getattr(inner, "__dict__", {})
    policies = [repr(value) for value in state.values() if is_dataclass(value)]
    return (getattr(inner, "__qualname__", type(inner)), *plain_attributes(state).items(), *policies)
