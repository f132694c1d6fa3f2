"""What one step of this rank came to, and the step of a model in one piece."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from .batches import Batch
from .stage_call import StageCall


@dataclass
class StepResult:
    """What one step gave on this rank.

    Args:
        losses: Each micro-batch's share of the mean loss; empty on ranks without the last stage.
        failure: The first error, if any.
        actions: When each forward (``"F"``) and backward (``"B"``) ran, in seconds since the epoch.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    failure: Exception | None = None
    actions: list[dict[str, Any]] = field(default_factory=list)

    def record(self, stage: int, kind: str, microbatch: int, start: float) -> None:
        """Note an action that ends now."""
        self.actions.append({"stage": stage, "kind": kind, "microbatch": microbatch, "start": start, "end": time.time()})


def run_whole(call: StageCall, parts: list[Batch], labels: list[Any], training: bool) -> StepResult:
    """Run all micro-batches through a model in one piece; gradients add up."""
    result = StepResult()
    try:
        for index, (part, label) in enumerate(zip(parts, labels, strict=True)):
            start = time.time()
            with torch.set_grad_enabled(training):
                loss = call(batch=part, labels=label)
            result.record(0, "F", index, start)
            if training:
                start = time.time()
                loss.backward()
                result.record(0, "B", index, start)
            result.losses.append(loss.detach())
    except Exception as err:
        result.failure = err
    return result
