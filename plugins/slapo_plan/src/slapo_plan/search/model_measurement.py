"""Measurement of a model by its parts, in a copy with few of its equal blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core import BuildPlan, Program, Schedule, SlapoError, Stage, create_schedule, get_logger
from slapo_training import StageParameters, StageRunner

from ..estimation.estimate import optimizer_factory, step_model
from ..estimation.stage_records import MOST_BYTES_WITH_VALUES, MOST_VALUES, needs_values
from ..measurement.fake_process_group import fake_ranks
from ..measurement.model_errors import NEEDS_VALUES, model_errors
from ..measurement.random_states import tracked_random_states
from ..measurement.repeated_blocks import BlocksNotRunError, block_runs, trimmed_runs
from ..measurement.segmented_stage import SegmentedStage
from ..measurement.stage_run import run_segmented
from ..recording.segments import RepeatedBlocks
from ..recording.storage_tracker import storage_bytes
from .layouts import ModelForm
from .model_record import ModelRecord, Part, StageEnds, StageSplitter

Batch = Mapping[str, Any]

CHECKPOINTS: Mapping[str, Mapping[str, Any]] = {"matmuls": {"policy": "matmuls"}, "full": {}}
"""Arguments of ``checkpoint`` for each policy, from the one that recomputes least."""


@dataclass(frozen=True)
class Measurement:
    """One schedule under which a model is measured.

    Args:
        form: The part of the model that a rank has.
        stages: True for the stages of a pipeline; False for the whole model.
        splits: True to measure backwards that are split in two as well.
        policy: Name of the checkpoint policy of all blocks; empty for those of the trimmed model.
    """

    form: ModelForm = ModelForm()
    stages: bool = False
    splits: bool = False
    policy: str = ""


class KeptBlock(NamedTuple):
    """One block of a trimmed model.

    Args:
        run: Number of its run of equal blocks.
        stands: Paths of the blocks in the model that it stands for; none if it is measured under a checkpoint policy.
        policy: Name of this policy.
    """

    run: int
    stands: tuple[str, ...]
    policy: str = "none"


@dataclass(frozen=True)
class TrimmedModel:
    """A copy of a model, on meta, with few blocks of each run of equal ones: some as they are, one for each checkpoint policy.

    Args:
        model: The copy.
        kept: Blocks of the copy by path.
        runs: Paths in the model of the blocks of each run.
    """

    model: nn.Module
    kept: Mapping[str, KeptBlock]
    runs: Sequence[tuple[str, ...]]

    @staticmethod
    def of(model: nn.Module, policies: Sequence[str] = ()) -> TrimmedModel:
        """Return such a copy of a model, which does not change, with blocks for some policies."""
        paths = {id(module): path for path, module in model.named_modules()}
        runs = block_runs(model, ahead=len(policies))
        with trimmed_runs(runs):
            made = copy.deepcopy(model)
            names = {id(run.holder): iter([*run.holder._modules]) for run in runs}
        kept: dict[str, KeptBlock] = {}
        whole = [tuple(f"{paths[id(run.holder)]}.{name}" for name in run.names) for run in runs]
        for number, run in enumerate(runs):
            for block in _kept_blocks(number, whole[number], len(run.kept), policies):
                kept[f"{paths[id(run.holder)]}.{next(names[id(run.holder)])}"] = block
        return TrimmedModel(made, kept, whole)

    @staticmethod
    def with_all_blocks(model: nn.Module) -> TrimmedModel:
        """Return a copy with all blocks, for a model that does not run without some."""
        paths = {id(module): path for path, module in model.named_modules()}
        runs = [tuple(f"{paths[id(run.holder)]}.{name}" for name in run.names) for run in block_runs(model)]
        kept = {path: KeptBlock(number, (path,)) for number, run in enumerate(runs) for path in run}
        return TrimmedModel(copy.deepcopy(model), kept, runs)

    @property
    def blocks(self) -> list[str]:
        """Paths of the blocks of the model."""
        return [path for run in self.runs for path in run]


def _kept_blocks(run: int, paths: tuple[str, ...], count: int, policies: Sequence[str]) -> list[KeptBlock]:
    """Return the blocks that are kept of one run: the first, one between, one for each policy with room for it, the last."""
    policies = policies[max(0, len(policies) - max(0, count - 2)) :]
    plain = count - len(policies)
    # the first of several stands for itself: its input may need no gradient
    stands = [paths[:1], paths[1:-1], paths[-1:]] if plain > 2 else [paths[:1], paths[1:]] if plain == 2 else [paths]
    blocks = [KeptBlock(run, each) for each in stands[:plain]]
    return [*blocks[:-1], *(KeptBlock(run, (), policy) for policy in policies), *blocks[-1:]]


def measure_model(
    trimmed: TrimmedModel,
    with_rows: Callable[[int], Batch],
    how: Measurement,
    target: str,
    options: Mapping[str, Any],
) -> tuple[ModelRecord, ModelRecord]:
    """Return a model's record for one row and for two.

    Args:
        trimmed: The copy; a schedule of it changes.
        with_rows: Returns the batch with some rows.
        how: The schedule.
        target: Name of the dialect.
        options: Options of ``build``.

    Raises:
        SlapoError: the schedule is refused, or the model does not run on fake tensors.
    """
    stages = min(3, len(trimmed.kept)) if how.stages else 1
    given = {**options, "microbatches": stages, "check": False}
    with tracked_random_states(), fake_ranks(pp=stages, tp=how.form.tp) as mesh, model_errors("plan"):
        sch = create_schedule(copy.deepcopy(trimmed.model), mesh=mesh, example_inputs=dict(with_rows(1)))
        _take_steps(sch, trimmed.kept, how, stages)
        program = BuildPlan.of(sch, target, **given).program
        runner = step_model(sch, target).stage_runner(program, given)
        factory = optimizer_factory(options["optimizer"])
        with runner.weights():
            found = []
            for rows in (1, 2):
                part = runner.split(with_rows(rows * stages))[0]
                planned = runner.plan(program, part)
                found.append(
                    _StageMeasurements(trimmed, planned, runner, part, factory if rows == 1 else None, how.splits).record()
                )
    return found[0], found[1]


def _take_steps(sch: Schedule, blocks: Mapping[str, KeptBlock], how: Measurement, stages: int) -> None:
    for path, name, arguments in how.form.steps():
        sch[path].apply(name, **arguments)
    for path, block in blocks.items():
        if (policy := how.policy or block.policy) != "none":
            sch[path].checkpoint(**CHECKPOINTS[policy])
    names = [*blocks]
    for path in (names[0], names[-2])[: stages - 1] if stages > 1 else ():
        sch[path].cut_pipeline_stage()


class _StageMeasurements:
    """Runs the stages of one program."""

    def __init__(
        self,
        trimmed: TrimmedModel,
        program: Program,
        runner: StageRunner,
        part: Batch,
        optimizer: Any,
        splits: bool,
    ) -> None:
        self.trimmed, self.program, self.runner = trimmed, program, runner
        self.part, self.optimizer, self.splits = part, optimizer, splits
        self.output = 0

    def record(self) -> ModelRecord:
        parts: dict[str, Part] = {}
        ends: list[StageEnds] = []
        for stage in self.program.stages:
            split = self._run(stage)
            ends.append(split.ends())
            parts |= split.blocks()
        if len(self.trimmed.kept) < len(self.trimmed.blocks):
            BlocksNotRunError.check(self.trimmed.kept, parts)
        kept = {path: self.trimmed.kept[path] for path in parts}
        plain = {path: (block.run, parts[name]) for name, block in kept.items() for path in block.stands}
        paths = tuple(plain)
        measured = {"none": tuple(part for _, part in plain.values())}
        for policy in CHECKPOINTS:
            found = {block.run: parts[name] for name, block in kept.items() if block.policy == policy}
            if {run for run, _ in plain.values()} <= found.keys():
                measured[policy] = tuple(found[run] for run, _ in plain.values())
        middle = ends[1] if len(ends) == 3 else StageEnds(ends[-1].entry, ends[0].exit, *_messages(ends))
        tied = self._bytes_of_ties()
        batch = sum(each.nbytes for each in self.part.values() if isinstance(each, torch.Tensor))  # a view of a larger batch
        return ModelRecord(ends[0], middle, ends[-1], measured, paths, tied, batch, self.output)

    def _run(self, stage: Stage) -> StageSplitter:
        modules = dict(stage.module.named_modules())
        blocks = {path: modules[path] for path in self.trimmed.kept if path in modules}

        def forward(received: tuple[torch.Tensor, ...], arguments: Batch) -> Any:
            return self.runner.run(self.program, stage.index, received, dict(arguments))

        repeated = [RepeatedBlocks((path,), (path,), 0) for path in blocks]

        def run(most_values: int | None = None, with_values: bool = False) -> SegmentedStage:
            given = stage, self.part, forward, self.optimizer, blocks, repeated
            return run_segmented(*given, StageParameters(), self.splits, most_values, with_values)

        can_run_on_values = storage_bytes(stage.module.parameters()) <= MOST_BYTES_WITH_VALUES
        found = run(with_values=True) if needs_values(stage.module) else _first_that_runs(run, can_run_on_values)
        self.output = max(self.output, *found.block_outputs.values(), 0)
        sizes = {path: storage_bytes(block.parameters()) for path, block in blocks.items()}
        halves = any(each.dtype in (torch.bfloat16, torch.float16) for each in stage.module.parameters())
        keeps_copies = halves and self.optimizer is not None and bool(self.runner.memories(self.optimizer))
        trained = [each for each in stage.module.parameters() if each.requires_grad]
        itemsize = sum(each.nbytes for each in trained) / max(1, sum(each.numel() for each in trained))
        return StageSplitter(found, sizes, *_outside(stage.module, [*blocks.values()]), itemsize or 1.0, keeps_copies)

    def _bytes_of_ties(self) -> int:
        last = len(self.program.stages) - 1
        if not last:
            return _tied_bytes(self.program.module, self.trimmed.kept)
        named = dict(self.program.module.named_parameters(remove_duplicate=False))
        return sum(named[tie.names[0]].nbytes for tie in self.program.ties if {0, last} <= set(tie.stages))


def _first_that_runs(run: Callable[..., SegmentedStage], can_run_on_values: bool) -> SegmentedStage:
    try:
        return run(MOST_VALUES)
    except SlapoError:
        raise
    except Exception as err:  # e.g. the model reads a large mask, or values that it computed
        get_logger().debug("a stage runs again with all values of the batch: %s", err)
    try:
        return run()
    except NEEDS_VALUES:
        if not can_run_on_values:
            raise
        return run(with_values=True)


def _outside(module: nn.Module, blocks: Sequence[nn.Module]) -> tuple[int, int]:
    """Return the bytes of parameters and buffers of no block: those before the last block in order, and those behind it."""
    inside = {id(each) for block in blocks for each in (*block.parameters(), *block.buffers())}
    order = [*module.parameters(), *module.buffers()]
    last = max((index for index, each in enumerate(module.parameters()) if id(each) in inside), default=-1)
    behind = [each for index, each in enumerate(module.parameters()) if index > last and blocks]
    ends = {id(each) for each in behind}
    before = [each for each in order if id(each) not in inside and id(each) not in ends]
    return storage_bytes(before), storage_bytes(behind)


def _tied_bytes(module: nn.Module, blocks: Mapping[str, KeptBlock]) -> int:
    """Return the bytes of parameters that have a name before the blocks and one behind them."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    inside = [index for index, name in enumerate(names) if any(name.startswith(f"{path}.") for path in blocks)]
    if not inside:
        return 0
    places: dict[int, set[bool]] = {}
    for index, (_, each) in enumerate(module.named_parameters(remove_duplicate=False)):
        if not inside[0] <= index <= inside[-1]:
            places.setdefault(id(each), set()).add(index > inside[-1])
    return sum(each.nbytes for each in module.parameters() if len(places.get(id(each), ())) == 2)


def _messages(ends: Sequence[StageEnds]) -> tuple[int, int, int]:
    return ends[-1].received, ends[0].sent, ends[-1].sent_back
