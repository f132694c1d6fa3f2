"""Facts about a step of target ``deepspeed`` for planners: order of actions, messages, reductions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slapo_core import BuildError
from slapo_training import PipelineAction, StepModel, one_forward_one_backward


class DeepSpeedStepModel(StepModel):
    """DeepSpeed's pipeline: 1F1B with one stage per rank; a message is sent after the action and waited for."""

    @classmethod
    def action_order(
        cls, config: Mapping[str, Any], stages: int, ranks: int, microbatches: int
    ) -> dict[int, list[PipelineAction]]:
        if stages != ranks:
            raise BuildError(f"{stages} stages on pp={ranks}: DeepSpeed runs one stage on each rank; cut {ranks} stages")
        return one_forward_one_backward(stages, microbatches)
