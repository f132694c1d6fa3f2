"""Access to DeepSpeed's gradients between the last backward and the step, for the user's gradient hooks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from slapo_training.gradient_hooks import GradientAccess

from ..process_state._deepspeed_private import bf16_gradient, loss_scale


class ReducedGradients(GradientAccess):
    """Access to the reduced gradients, which ZeRO shards over the replicas.

    ``deepspeed`` is the module.
    """

    counts_unused = True

    def __init__(self, model: Any, deepspeed: Any, zero_stage: int) -> None:
        self._model, self._deepspeed, self._zero_stage = model, deepspeed, zero_stage
        if zero_stage or model.fp16_enabled() or model.bfloat16_enabled():
            self.steps_all, self.keeps_weights = True, "target 'deepspeed' keeps elsewhere with ZeRO or half precision"

    @property
    def _scale(self) -> float:
        """Loss scale that the gradients still contain."""
        return loss_scale(self._model)

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the full reduced gradient. Collective over the replicas with ZeRO."""
        from deepspeed.utils import safe_get_full_grad

        found: torch.Tensor | None = safe_get_full_grad(parameter) if parameter.requires_grad else None
        return found if found is None or self._scale == 1.0 else found / self._scale

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
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
        """Gather parameters inside that stage 3 of ZeRO shards. Collective over the replicas."""
        if self._zero_stage < 3:
            return nullcontext()
        gathered: AbstractContextManager[object] = self._deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=None)
        return gathered
