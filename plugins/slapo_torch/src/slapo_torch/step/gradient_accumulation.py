"""Result of one step on this rank, the step of a model without pipeline stages, and the memory of its first gradients."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_training.batches import Batch
from slapo_training.losses import LossReduction, note_failure

from ..gradients.reduction import DDPReplicas
from .stage_call import MicroBatchWeight, StageCall

if TYPE_CHECKING:
    from ..fsdp.unit_runtime import UnitRuntime


@dataclass
class StepResult:
    """Result of one step on this rank.

    Args:
        losses: Weighted loss of each micro-batch; empty on ranks without the last stage.
        counted: Reduction of each loss.
        has_gradient: True if a loss depends on trained parameters.
        failure: The first error, or None.
        unused: Number of trainable parameters of this rank that no micro-batch used; counted with replicas only.
        actions: Start and end of each forward (``"F"``) and backward (``"B"``), in seconds since the epoch.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    counted: list[LossReduction] = field(default_factory=list)
    has_gradient: bool = False
    failure: Exception | None = None
    unused: int = 0
    actions: list[dict[str, Any]] = field(default_factory=list)

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch; a leaf has no gradient."""
        self.has_gradient = self.has_gradient or not loss.is_leaf
        self.losses.append(loss.detach())

    def record(self, stage: int, kind: str, microbatch: int, start: float) -> None:
        """Record an action that ends now."""
        self.actions.append({"stage": stage, "kind": kind, "microbatch": microbatch, "start": start, "end": time.time()})


def run_microbatches(
    call: StageCall,
    parts: list[Batch],
    labels: list[Any],
    weight: MicroBatchWeight,
    training: bool,
    replicas: DDPReplicas | None = None,
    unit_runtime: UnitRuntime | None = None,
) -> StepResult:
    """Run all micro-batches through a model without pipeline stages; accumulate gradients and average them over replicas.

    Micro-batches after an error do not run. With FSDP their units are still gathered and reduced, as other replicas expect.
    """
    result = StepResult(counted=call.begin(weight))
    replicas = replicas if training else None
    first = GradientUnaliasing(call.module) if training else None
    for index, (part, label) in enumerate(zip(parts, labels, strict=True)):
        waits = replicas is not None and index + 1 < len(parts)
        try:
            with (
                replicas.no_sync() if replicas is not None and waits else nullcontext(),
                unit_runtime.microbatch(training) if unit_runtime is not None else nullcontext(),
            ):
                if result.failure is None:
                    _run_microbatch(call, index, {"batch": part, "labels": label}, first, replicas, result)
        except Exception as err:
            result.failure = result.failure or err
            note_failure(label, err)
    if replicas is not None:
        result.unused = replicas.finish()
    return result


def _run_microbatch(
    call: StageCall,
    index: int,
    inputs: dict[str, Any],
    first: GradientUnaliasing | None,
    replicas: DDPReplicas | None,
    result: StepResult,
) -> None:
    start = time.time()
    with torch.set_grad_enabled(first is not None):
        loss = call(**inputs) if replicas is None else replicas.run(call, **inputs)
    result.record(0, "F", index, start)
    if first is not None:
        start = time.time()
        loss.backward()
        first.separate()
        result.record(0, "B", index, start)
    result.add(loss)


MemoryExtent = tuple[str, int, int]
"""Memory of a tensor: device, address of the first byte, and address after the last byte."""


def memory_extents(tensors: Iterable[torch.Tensor | None]) -> list[MemoryExtent]:
    """Return the memory extents of dense tensors with elements."""
    return [_extent(tensor) for tensor in tensors if tensor is not None and _is_plain(tensor)]


class GradientUnaliasing:
    """Gives first gradients of one step a memory of their own; the module's parameters have no gradients yet.

    Autograd and the pipeline runtime keep a parameter's first gradient as the backward made it. Its memory may also be that of
    another parameter's gradient, or of a gradient that a stage has yet to send. Later micro-batches would accumulate into both.
    """

    def __init__(self, module: nn.Module) -> None:
        self._waiting = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def separate(self, kept: Iterable[MemoryExtent] = ()) -> None:
        """Copy new gradients that share memory with each other, with ``kept``, or between elements; call after a backward."""
        new = [parameter for parameter in self._waiting if parameter.grad is not None]
        if not new:
            return
        self._waiting = [parameter for parameter in self._waiting if parameter.grad is None]
        found = [(_extent(p.grad), p) for p in new if p.grad is not None and _is_plain(p.grad)]
        places: list[tuple[MemoryExtent, nn.Parameter | None]] = [*found, *((extent, None) for extent in kept)]
        group: list[nn.Parameter | None] = []
        device, end = "", 0
        for extent, parameter in sorted(places, key=lambda place: place[0]):
            if extent[0] != device or extent[1] >= end:
                _copy(group)
                group, (device, _, end) = [], extent
            group.append(parameter)
            end = max(end, extent[2])
        _copy(group)


def _copy(group: list[nn.Parameter | None]) -> None:
    """Copy the gradients of a group that overlaps in memory; None stands for memory that is kept."""
    for parameter in group:
        if parameter is not None and (gradient := parameter.grad) is not None:
            _, start, end = _extent(gradient)
            if len(group) > 1 or end - start < gradient.nbytes:
                parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def _extent(tensor: torch.Tensor) -> MemoryExtent:
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() > 0
