"""Measurement of what one rank allocates and sends in a step of a real engine: the truth that estimates are compared with."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..recording.run_recorder import RunRecorder
from ..recording.storage_tracker import resizes_noted
from ..records import Work
from ._torch_private import FakeTensor


class MeasuredStep(NamedTuple):
    """One step of one rank.

    Args:
        held: Bytes of all tensors before the step.
        peak: Most bytes of tensors during the step.
        work: Collectives, in order.
    """

    held: int
    peak: int
    work: tuple[Work, ...]


def measure_step(step: Callable[[], Any]) -> MeasuredStep:
    """Run a step and count the storages of all tensors of this process, those before the step included.

    The first step of an engine allocates its state; measure a later one.

    Args:
        step: Runs it, e.g. ``lambda: engine.train_batch(**batch)``.
    """
    recorder = RunRecorder()
    gc.collect()
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor) and _has_memory(value)]
    recorder.memory.add(tensors)
    recorder.memory.add([value.grad for value in tensors if value.is_leaf and value.grad is not None])
    del tensors
    held = recorder.memory.live
    recorder.memory.begin_segment()
    with resizes_noted(recorder.memory), recorder:
        step()
    return MeasuredStep(held, recorder.memory.peak, recorder.take_work())


def _has_memory(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)
