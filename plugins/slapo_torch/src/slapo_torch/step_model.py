"""Facts about a step of target ``torch`` for planners: order of actions, messages, reductions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slapo_training import MessageMode, PipelineAction, StepModel

from .options import Options
from .pipelining.schedules import action_order, runnable_schedule


class TorchStepModel(StepModel):
    """Order of actions and overlap of target ``torch``."""

    @classmethod
    def action_order(
        cls, config: Mapping[str, Any], stages: int, ranks: int, microbatches: int
    ) -> dict[int, list[PipelineAction]]:
        return action_order(_schedule(config), stages, ranks, microbatches)

    @classmethod
    def message_mode(cls, config: Mapping[str, Any], stages: int, ranks: int, microbatches: int) -> MessageMode:
        """Return how messages are sent: torch's 1F1B waits for each send, its GPipe receives when it needs a tensor."""
        modes: dict[str, MessageMode] = {"1f1b": "blocking", "gpipe": "on_demand"}
        return modes.get(runnable_schedule(_schedule(config), stages, microbatches), "overlapped")

    @classmethod
    def overlaps_reduction(cls, config: Mapping[str, Any], stages: int, ranks: int) -> bool:
        """Return True with one stage per rank, whose gradients are reduced by ``DistributedDataParallel``."""
        return stages == ranks and config.get("data_parallel", Options.data_parallel) == "ddp"


def _schedule(config: Mapping[str, Any]) -> str:
    return str(config.get("pipeline_schedule", Options.pipeline_schedule))
