"""Facts about a step of target ``megatron`` for planners: order of actions, messages, reductions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from slapo_core import BuildError, Program
from slapo_training import (
    MemoryRules,
    MessageMode,
    OptimizerFactory,
    PipelineAction,
    PipelineChoice,
    ReplicaChoice,
    StageRunner,
    StepModel,
    one_forward_one_backward,
)

from .configuration.options import MegatronOptions
from .stage_runner import MegatronStageRunner


class MegatronStepModel(StepModel):
    """Megatron's pipelines: 1F1B with one stage per rank, and interleaved 1F1B with several."""

    @classmethod
    def action_order(
        cls, config: Mapping[str, Any], stages: int, ranks: int, microbatches: int
    ) -> dict[int, list[PipelineAction]]:
        if stages % ranks or ranks == 1 < stages:
            raise BuildError(f"{stages} stages on pp={ranks}; cut the model into a multiple of pp stages, with pp of 2 or more")
        if stages == ranks:
            return one_forward_one_backward(stages, microbatches)
        group = int(_section(config, "transformer").get("microbatch_group_size_per_vp_stage") or ranks)
        if microbatches < group or 0 < microbatches % group < ranks:
            raise BuildError(
                f"{microbatches} micro-batches on pp={ranks} with {stages // ranks} stages per rank; use a multiple of {group}"
            )
        return {rank: _interleaved_order(stages // ranks, rank, ranks, microbatches, group) for rank in range(ranks)}

    @classmethod
    def stage_runner(cls, program: Program, config: Mapping[str, Any]) -> StageRunner:
        return MegatronStageRunner(program, MegatronOptions.of(config))

    @classmethod
    def pipeline_choices(cls) -> Mapping[str, PipelineChoice]:
        return {"1f1b": PipelineChoice({}), "interleaved": PipelineChoice({}, 2)}

    @classmethod
    def replica_choices(cls) -> Mapping[str, ReplicaChoice]:
        return {
            "ddp": ReplicaChoice({}),
            "distributed_optimizer": ReplicaChoice({"distributed_optimizer": True}, ("optimizer",)),
        }

    @classmethod
    def memory_rules(cls, config: Mapping[str, Any], stages: int, ranks: int, replicas: int) -> MemoryRules:
        return MemoryRules(holds_received=stages > 1)

    @classmethod
    def named_optimizer(cls, config: Mapping[str, Any]) -> OptimizerFactory | None:
        """Return torch's optimizer of the kind that the section ``optimizer`` names."""
        section = _section(config, "optimizer")
        if not section:
            return None
        if section.get("optimizer") == "sgd":
            return partial(torch.optim.SGD, lr=section.get("lr", 0.0), momentum=section.get("sgd_momentum", 0.9))
        return partial(torch.optim.AdamW, lr=section.get("lr", 0.0))

    @classmethod
    def message_mode(cls, config: Mapping[str, Any], stages: int, ranks: int, microbatches: int) -> MessageMode:
        """Return how messages are sent: interleaved stages overlap them unless ``overlap_p2p_comm`` is off."""
        if stages == ranks:
            return "blocking"
        return "overlapped" if _section(config, "transformer").get("overlap_p2p_comm", True) else "on_demand"

    @classmethod
    def overlaps_reduction(cls, config: Mapping[str, Any], stages: int, ranks: int) -> bool:
        """Return the ``overlap_grad_reduce`` of the section ``ddp``."""
        return bool(_section(config, "ddp").get("overlap_grad_reduce", False))


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return (config.get("config") or {}).get(name) or {}


def _interleaved_order(chunks: int, rank: int, ranks: int, microbatches: int, group: int) -> list[PipelineAction]:
    """Return the order of one rank: groups of micro-batches go through its stages one after the other."""
    forwards, backwards = [], []
    for first in range(0, microbatches, group):
        numbers = range(first, min(first + group, microbatches))
        for chunk in range(chunks):
            forwards += [PipelineAction("F", chunk * ranks + rank, number) for number in numbers]
            backwards += [PipelineAction("B", (chunks - 1 - chunk) * ranks + rank, number) for number in numbers]
    warmup = min(len(forwards), 2 * (ranks - rank - 1) + (chunks - 1) * group)
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += [forward, backward]
    return row + backwards[len(forwards) - warmup :]
