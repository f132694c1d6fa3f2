"""Facts about a step of target ``deepspeed`` for planners: order of actions, messages, reductions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from slapo_core import BuildError, Program
from slapo_training import (
    CollectiveRecord,
    MemoryRules,
    OptimizerFactory,
    PipelineAction,
    ReplicaChoice,
    StageRunner,
    StepFacts,
    StepModel,
    one_forward_one_backward,
)

from .configuration.options import DeepSpeedOptions
from .estimation.zero_settings import ZeroSettings
from .stage_runner import DeepSpeedStageRunner
from .step_collectives import StepCollectives


class DeepSpeedStepModel(StepModel):
    """DeepSpeed's pipeline: 1F1B with one stage per rank; a message is sent after the action and waited for."""

    @classmethod
    def action_order(
        cls, config: Mapping[str, Any], stages: int, ranks: int, microbatches: int
    ) -> dict[int, list[PipelineAction]]:
        if stages != ranks:
            raise BuildError(f"{stages} stages on pp={ranks}: DeepSpeed runs one stage on each rank; cut {ranks} stages")
        return one_forward_one_backward(stages, microbatches)

    @classmethod
    def stage_runner(cls, program: Program, config: Mapping[str, Any]) -> StageRunner:
        return DeepSpeedStageRunner(program, DeepSpeedOptions.of(config))

    @classmethod
    def replica_choices(cls) -> Mapping[str, ReplicaChoice]:
        """Return the stages of ZeRO."""
        divided = ((), ("optimizer",), ("gradients", "optimizer"), ("parameters", "gradients", "optimizer"))
        return {
            f"zero{stage}": ReplicaChoice({"config": {"zero_optimization": {"stage": stage}}}, kinds, stage < 2)
            for stage, kinds in enumerate(divided)
        }

    @classmethod
    def memory_rules(cls, config: Mapping[str, Any], stages: int, ranks: int, replicas: int) -> MemoryRules:
        is_pipeline = stages > 1
        rules = MemoryRules(holds_received=is_pipeline, fixed_buffers=is_pipeline, kept_losses=2 * is_pipeline)
        settings = ZeroSettings.of(options := DeepSpeedOptions.of(config), is_pipeline)
        if not settings.stage:
            return rules
        bucket = settings.is_contiguous * settings.reduce_bucket * (4 if options.settled_precision == "fp32" else 2)
        buckets = (1 + (settings.overlaps and settings.stage < 3)) * bucket
        copies = 4 if options.settled_precision == "fp32" else 0  # the optimizer steps copies of all half-precision parameters
        return rules._replace(main_itemsize=copies, step_itemsize=12, backward_bytes=buckets)

    @classmethod
    def named_optimizer(cls, config: Mapping[str, Any]) -> OptimizerFactory | None:
        """Return torch's optimizer of the kind that the configuration names; DeepSpeed's own have the same state."""
        section = DeepSpeedOptions.of(config).section("optimizer")
        if not section:
            return None
        kind = str(section.get("type", "")).lower()
        found = {name.lower(): each for name, each in vars(torch.optim).items() if isinstance(each, type)}
        return partial(found.get(kind, torch.optim.AdamW), lr=section.get("params", {}).get("lr", 0.0))

    @classmethod
    def collectives(cls, program: Program, config: Mapping[str, Any], rank: int, facts: StepFacts) -> list[CollectiveRecord]:
        return [*StepCollectives(program, DeepSpeedOptions.of(config), rank, facts).records()]
