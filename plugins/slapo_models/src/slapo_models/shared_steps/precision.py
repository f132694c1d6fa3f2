"""``fp16`` and ``bf16``: conversion of parameters and buffers, which a failure takes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

from slapo_core import Schedule

from .configuration import Configuration


def convert_precision(schedule: Schedule, config: Configuration) -> None:
    """Convert parameters and buffers in place, as ``model.half()`` does, before the first step.

    Raises:
        ScheduleError: the schedule has steps, which could not be undone then.
    """
    dtype = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None
    if dtype is None:
        return
    if schedule.journal.steps:
        message = f"{'fp16' if config.fp16 else 'bf16'} converts the model, and its schedule has steps already"
        raise config.error(schedule, f"{message}; convert the model before create_schedule")
    for tensor in _floating_point_tensors(schedule.mod):
        tensor.data = tensor.data.to(dtype)


@contextmanager
def restored_on_error(module: nn.Module) -> Iterator[None]:
    """Restore the data of parameters and buffers if the block fails."""
    before = [(tensor, tensor.data) for tensor in _floating_point_tensors(module)]
    try:
        yield
    except BaseException:
        for tensor, data in before:
            if tensor.dtype != data.dtype:
                tensor.data = data
        raise


def _floating_point_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for tensor in chain(module.parameters(), module.buffers()) if tensor.is_floating_point()]
