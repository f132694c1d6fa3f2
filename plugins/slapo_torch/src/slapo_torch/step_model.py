"""Facts about a step of target ``torch`` for planners: order of actions, messages, reductions."""

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
    OptimizerFactory,
    PipelineAction,
    PipelineChoice,
    ReplicaChoice,
    StageParameters,
    StageRunner,
    StepFacts,
    StepGroups,
    StepModel,
)
from slapo_training.batch_arguments import arguments_of
from slapo_training.batches import Batch, split, variadic_argument
from slapo_training.losses import FakeReplicaLoss
from slapo_training.optimizers import FakeWholeTensors, update_dependence

from .gradients.reduction import BUCKET_BYTES
from .options import Options
from .pipelining.schedules import action_order, kind_of, runnable_schedule, schedule_for_batch
from .split_tensors import has_split, split_tensors
from .step.stage_call import StageCall, autocast_context

_STAGES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zero_bubble": 2, "zbv": 2, "dualpipev": 2}
"""Stages per rank of the schedules that planners may choose."""
_SPLIT = ("zero_bubble", "zbv", "dualpipev")
_TRIED = ("1f1b", "interleaved", "zbv")
"""Those that planners choose by themselves: the others wait as long with more memory."""


class TorchStepModel(StepModel):
    """Order of actions and overlap of target ``torch``."""

    @classmethod
    def action_order(
        cls, config: Mapping[str, Any], stages: int, ranks: int, microbatches: int
    ) -> dict[int, list[PipelineAction]]:
        return action_order(_schedule(config), stages, ranks, microbatches)

    @classmethod
    def stage_runner(cls, program: Program, config: Mapping[str, Any]) -> StageRunner:
        return TorchStageRunner(program, Options.of(config))

    @classmethod
    def pipeline_choices(cls) -> Mapping[str, PipelineChoice]:
        return {
            name: PipelineChoice({"pipeline_schedule": name}, number, name in _TRIED, name in _SPLIT)
            for name, number in _STAGES.items()
        }

    @classmethod
    def replica_choices(cls) -> Mapping[str, ReplicaChoice]:
        everything = "parameters", "gradients", "optimizer"
        kinds = {"ddp": (), "fsdp": everything}
        return {name: ReplicaChoice({"data_parallel": name}, divided) for name, divided in kinds.items()}

    @classmethod
    def memory_rules(cls, config: Mapping[str, Any], stages: int, ranks: int, replicas: int) -> MemoryRules:
        ddp = replicas > 1 and config.get("data_parallel", Options.data_parallel) == "ddp"
        staged, several = stages > 1, kind_of(_schedule(config)).stages_per_rank != 1
        keeps_sent = staged and (several or _schedule(config) == "gpipe")
        afterwards = ddp and staged and several
        return MemoryRules(ddp and not afterwards, staged, keeps_sent, flattens_gradients=afterwards, tie_bucket=BUCKET_BYTES)

    @classmethod
    def collectives(cls, program: Program, config: Mapping[str, Any], rank: int, facts: StepFacts) -> list[CollectiveRecord]:
        from .step_collectives import StepCollectives  # noqa: PLC0415  importing torch.distributed.fsdp costs a second

        return [*StepCollectives(program, Options.of(config), rank, facts).records()]

    @classmethod
    def notes(cls, program: Program, config: Mapping[str, Any]) -> list[str]:
        options, found = Options.of(config), []
        if options.loss_over is not None and options.microbatches > 1:
            found.append(
                "loss_over='replicas' with several micro-batches: the memory of their outputs, gathered and of the last "
                "stage between steps, and the seconds of the forwards that run before are not counted"
            )
        given, runner = options.optimizer, TorchStageRunner(program, options)
        if isinstance(given, torch.optim.Optimizer):
            given = partial(type(given), **given.defaults)
        whole = [] if given is None else [runner.whole_tensors(program, each.index, given) for each in program.stages]
        if any(each is not None and each.may_step_in_place for each in whole):
            found.append(
                "the optimizer steps whole tensors; large ones that it could step in place are counted as sent to an owner"
            )
        return found

    @classmethod
    def message_mode(cls, config: Mapping[str, Any], stages: int, ranks: int, microbatches: int) -> MessageMode:
        """Return how messages are sent: torch's 1F1B waits for each send, its GPipe receives when it needs a tensor."""
        modes: dict[str, MessageMode] = {"1f1b": "blocking", "gpipe": "on_demand"}
        return modes.get(runnable_schedule(_schedule(config), stages, microbatches), "overlapped")

    @classmethod
    def overlaps_reduction(cls, config: Mapping[str, Any], stages: int, ranks: int) -> bool:
        """Return True with one stage per rank, whose gradients are reduced by ``DistributedDataParallel``."""
        return stages == ranks and config.get("data_parallel", Options.data_parallel) == "ddp"


class TorchStageRunner(StageRunner):
    """Runs stages as ``TorchEngine`` does."""

    def __init__(self, program: Program, options: Options) -> None:
        self._program, self._options = program, options
        self._device = program.mesh.device_type if program.mesh is not None else "cpu"
        self._calls: dict[int, StageCall] = {}
        self._gathers_all, self._num_parts = False, 1
        self._replica_loss: FakeReplicaLoss | None = None

    def split(self, batch: Mapping[str, Any]) -> list[Batch]:
        module, options, rows = self._program.module, self._options, self._options.batch_rows
        given = arguments_of(module, (), batch, options)
        count = rows.count(given)
        self._num_parts = number = schedule_for_batch(options.pipeline_schedule, self._program, options.microbatches, count)[1]
        return split(given, number, several=variadic_argument(module), rows=rows)

    def plan(self, program: Program, part: Batch) -> Program:
        with autocast_context(self._options, self._device):
            return super().plan(program, self._options.model_arguments(part))

    def run(self, program: Program, stage: int, received: Sequence[torch.Tensor], part: Batch) -> Any:
        arguments, labels = dict(part), None
        if self._options.loss_fn is not None:
            labels = arguments.pop("labels", None)
        if len(program.stages) > 1:
            arguments = {name: arguments[name] for name in program.stages[stage].batch_inputs if name in arguments}
        if (call := self._calls.get(stage)) is None or call.module is not program.stages[stage].module:
            last = stage + 1 == len(program.stages)
            outputs = None if last else program.stages[stage + 1].inputs
            call = self._calls[stage] = StageCall(program.stages[stage], outputs, self._options, self._device)
        if self._options.loss_over is not None and stage + 1 == len(program.stages):
            labels = self._loss_over(program).loss_of_part(labels, self._options.batch_rows.count(part))
        return call(*received, batch=arguments, labels=labels)

    def _loss_over(self, program: Program) -> FakeReplicaLoss:
        if (found := self._replica_loss) is None:
            ranks = StepGroups(program, program.rank_of(len(program.stages) - 1)).ranks("dp")
            loss_fn, precision = self._options.loss_fn, partial(autocast_context, self._options, self._device)
            assert loss_fn is not None
            found = FakeReplicaLoss(program, loss_fn, torch.device(self._device), precision, self._num_parts, ranks)
            self._replica_loss = found
        return found

    @property
    def repeats_forward(self) -> bool:  # type: ignore[override]
        return self._options.loss_over is not None and self._num_parts > 1

    @property
    def loss_collectives(self) -> Sequence[CollectiveRecord]:  # type: ignore[override]
        return [CollectiveRecord(*each) for each in self._replica_loss.collectives] if self._replica_loss is not None else []

    def parameters(self, program: Program, stage: int) -> StageParameters:
        if self._options.data_parallel != "fsdp" or program.axis_size("dp") == 1:
            return StageParameters()
        from .fsdp.fake_unit import FakeShards  # noqa: PLC0415  importing torch.distributed.fsdp costs a second

        return FakeShards(program, stage, self._options.fsdp_units, self._gathers_all)

    def whole_tensors(self, program: Program, stage: int, optimizer: OptimizerFactory) -> FakeWholeTensors | None:
        trained = [each for each in program.stages[stage].module.parameters() if each.requires_grad]
        replicas = program.axis_size("dp") if self._options.data_parallel == "fsdp" else 1
        if not has_split(trained, replicas):
            return None
        found = update_dependence(optimizer, trained)
        joins = found.coupled or (bool(found.why_unknown) and len(program.stages) == 1)
        if not found.shape and not joins:
            return None
        groups = StepGroups(program, program.rank_of(stage))
        split = [*split_tensors(trained, groups, replicas)]  # takes seconds with a thousand replicas
        parts = {id(whole.source) for each in split for whole in each.wholes}
        others = [tuple(each.shape) for each in trained if id(each) not in parts]
        return FakeWholeTensors(optimizer, split, others, trained[0].dtype, joins, groups.ranks()[0])

    def adapts_to(self, error: Exception) -> bool:
        """Gather all units for the whole step after an error of their order, unless ``fsdp_units`` are given."""
        from .fsdp.unit import REMEDY  # noqa: PLC0415

        is_order = isinstance(error, BuildError) and REMEDY in str(error)
        if not is_order or self._gathers_all or self._options.fsdp_units is not None:
            return False
        self._gathers_all = True
        return True


def _schedule(config: Mapping[str, Any]) -> str:
    return str(config.get("pipeline_schedule", Options.pipeline_schedule))
