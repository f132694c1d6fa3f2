"""Gradients as DeepSpeed has them between the last backward and the step, for the user's hooks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from slapo_training.gradient_hooks import GradientAccess

from ..process_state._deepspeed_private import bf16_gradient, loss_scale


class ReducedGradients(GradientAccess):
    """Reads and writes reduced gradients, which ZeRO shares out over the replicas.

    Args:
        model: DeepSpeed's engine.
        deepspeed: The module.
        zero_stage: Stage of ZeRO.
    """

    counts_unused = True

    def __init__(self, model: Any, deepspeed: Any, zero_stage: int) -> None:
        self._model, self._deepspeed, self._zero_stage = model, deepspeed, zero_stage
        if zero_stage or model.fp16_enabled() or model.bfloat16_enabled():
            self.steps_all, self.keeps_weights = True, "target 'deepspeed' keeps elsewhere with ZeRO or half precision"

    @property
    def _scale(self) -> float:
        """Factor of the loss, which is still in the gradients."""
        return loss_scale(self._model)

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the reduced gradient of all replicas. Collective over these with ZeRO."""
        from deepspeed.utils import safe_get_full_grad

        found: torch.Tensor | None = safe_get_full_grad(parameter) if parameter.requires_grad else None
        return found if found is None or self._scale == 1.0 else found / self._scale

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Let this be the reduced gradient."""
        from deepspeed.utils import safe_set_full_grad

        if gradient is None:
            parameter.grad = None
            return
        scaled = gradient if self._scale == 1.0 else gradient * self._scale
        if (kept := bf16_gradient(parameter)) is not None:
            kept.copy_(scaled)
        else:
            safe_set_full_grad(parameter, scaled.contiguous())

    def values(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[object]:
        """Let parameters be whole inside that stage 3 of ZeRO shares out. Collective over the replicas."""
        if self._zero_stage < 3:
            return nullcontext()
        gathered: AbstractContextManager[object] = self._deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=None)
        return gathered
