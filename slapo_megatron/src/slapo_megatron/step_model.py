"""Facts about a step of target ``megatron`` for planners: order of actions, messages, reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from slapo_core import BuildError, Program
from slapo_training import (
    CollectiveRecord,
    MemoryRules,
    MessageMode,
    MessageSizes,
    OptimizerFactory,
    PipelineAction,
    PipelineChoice,
    ReplicaChoice,
    StageRunner,
    StepFacts,
    StepModel,
    one_forward_one_backward,
)

from .configuration.options import MegatronOptions
from .estimation.interleaved_messages import InterleavedSchedule
from .stage_runner import MegatronStageRunner
from .step_collectives import StepCollectives


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
        group = _group_size(config, ranks)
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
        size = _gradient_itemsize(MegatronOptions.of(config))
        if stages == ranks:
            return MemoryRules(holds_received=stages > 1, gradient_itemsize=size)
        return MemoryRules(gradient_itemsize=size, messages=partial(_interleaved_messages, config, stages, ranks))

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
    def collectives(cls, program: Program, config: Mapping[str, Any], rank: int, facts: StepFacts) -> list[CollectiveRecord]:
        return [*StepCollectives(program, MegatronOptions.of(config), rank, facts).records()]

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


def _gradient_itemsize(options: MegatronOptions) -> int:
    in_fp32 = options.section("ddp").get("grad_reduce_in_fp32", True)
    return 4 if in_fp32 or options.settled_precision == "fp32" else 2


def _interleaved_order(chunks: int, rank: int, ranks: int, microbatches: int, group: int) -> list[PipelineAction]:
    """Return the order of one rank: groups of micro-batches go through its stages one after the other."""
    forwards, backwards = [], []
    for first in range(0, microbatches, group):
        numbers = range(first, min(first + group, microbatches))
        for chunk in range(chunks):
            forwards += [PipelineAction("F", chunk * ranks + rank, number) for number in numbers]
            backwards += [PipelineAction("B", (chunks - 1 - chunk) * ranks + rank, number) for number in numbers]
    warmup = _num_warmup(chunks, rank, ranks, microbatches, group)
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += [forward, backward]
    return row + backwards[len(forwards) - warmup :]


def _num_warmup(chunks: int, rank: int, ranks: int, microbatches: int, group: int) -> int:
    return min(chunks * microbatches, 2 * (ranks - rank - 1) + (chunks - 1) * group)


def _group_size(config: Mapping[str, Any], ranks: int) -> int:
    return int(_section(config, "transformer").get("microbatch_group_size_per_vp_stage") or ranks)


def _interleaved_messages(
    config: Mapping[str, Any], stages: int, ranks: int, order: Sequence[PipelineAction], sizes: Mapping[int, MessageSizes]
) -> list[int]:
    """Return the bytes of messages during each action of a rank; its first action is of its first stage."""
    rank, group = order[0].stage, _group_size(config, ranks)
    microbatches = 1 + max(each.microbatch for each in order)
    warmup = _num_warmup(stages // ranks, rank, ranks, microbatches, group)
    is_first, is_last, slots = rank == 0, rank + 1 == ranks, group - ranks + 1
    is_flushed = bool(_section(config, "transformer").get("overlap_p2p_comm_warmup_flush"))
    kept = slots if is_first else 1, slots if is_last else 1
    return InterleavedSchedule(warmup, *kept, is_flushed, is_first, is_last).bytes_during(order, sizes)
