"""Result of one step on this rank, and the step of a model without pipeline stages."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from slapo_training.batches import Batch
from slapo_training.engines import GradientUnaliasing
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
