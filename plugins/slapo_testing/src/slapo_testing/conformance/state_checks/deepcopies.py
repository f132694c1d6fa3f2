"""Check of deep copies of a scheduled model."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from slapo_core import parameter_facts, shard_spec
from slapo_tracing.nodes import forward_wrappers

from ..examples.case import Case, ConformanceError


def check_deepcopy(case: Case) -> None:
    """Check that a deep copy of the scheduled model computes the same, keeps parameter facts, and shares no memory."""
    schedule = case.make_schedule()
    copied = copy.deepcopy(schedule.mod)
    tensors = dict(schedule.mod.named_parameters(remove_duplicate=False))
    for name, parameter in copied.named_parameters(remove_duplicate=False):
        if parameter_facts(parameter).names != parameter_facts(tensors[name]).names or shard_spec(parameter) != shard_spec(
            tensors[name]
        ):
            raise ConformanceError(f"a deep copy loses the facts of {name!r}")
    taken = {memory: what for what, tensor in _tensors(schedule.mod) if (memory := _memory(tensor))}
    for what, tensor in _tensors(copied):
        if _memory(tensor) in taken:
            raise ConformanceError(f"a deep copy shares {what} with the model")
    case.compare(schedule.mod, copied, "a deep copy of the model")


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the mutable tensors: parameters, buffers, and tensors held by wrappers."""
    yield from ((repr(name), tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers()))
    for path, module in model.named_modules():
        for wrapper in forward_wrappers(module):
            for name, value in getattr(wrapper, "__dict__", {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{name} of a wrapper of {path!r}", value


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none, or several."""
    if is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0
