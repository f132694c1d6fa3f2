"""The classic interface: functions that partition a schedule at its cuts and build an engine of the stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from slapo_core import (
    BuildError,
    Engine,
    Program,
    Schedule,
    ScheduleError,
    Stage,
    build,
    build_program,
    named_inputs,
    split_inputs,
)
from slapo_tracing.recording import Sandbox

from .partition.partitioned_module import PartitionedModule
from .partition.partitioner import Partitioner
from .tracing.cuts import Cut, cut_where, cuts_of_steps
from .tracing.flat_trace import named_batch

__all__ = ["add_partition_notation", "build_pipeline_model", "generate_pipeline_partition", "propagate_partition"]


def generate_pipeline_partition(sch: Schedule) -> Schedule:
    """Partition the schedule's model at its cuts.

    The model and its schedule do not change: steps can still be taken and undone. ``build`` gives the same engine without it.

    Args:
        sch: Any handle of the schedule.

    Returns:
        A schedule whose children are the stages, ``submod_0``, ``submod_1``, …, on the model's parameters; one stage without
        cuts. Every module of a stage has the stage's number as ``partition_idx``, and ``program`` has the stages for engines.
        The schedule can be built, saved and verified as the original.

    Raises:
        BuildError: no schedule; no example inputs; the number of stages is not a multiple of the pipeline ranks.
        ScheduleError: a cut leaves a stage with no node to run.
        TraceError: the model cannot be traced, or a value that is not a tensor would have to cross a boundary.
    """
    top = _require_schedule(sch).get_top_schedule()
    if isinstance(top.mod, PartitionedModule):
        return top
    return _schedule_of_stages(top, build_program(top), 0)


def propagate_partition(sch: Schedule, starting_stage_id: int = 0, stop_at: str | None = None) -> tuple[PartitionedModule, int]:
    """Partition a module at the cuts inside it, and with it each module around it, up to a given one.

    Every operation of the graphs gets a stage, one higher after each cut. With a cut at the module itself, its last part is a
    stage of its own; without one, that part shares its stage with the operations that follow in the module around it. The
    model does not change.

    Args:
        sch: Schedule of a module that runs once.
        starting_stage_id: Number of the first stage.
        stop_at: Path or name of the schedule to end at; default: the top.

    Returns:
        The module at ``stop_at``, partitioned, with the children ``submod_<stage>``; and the number of the next stage. Every
        module of a stage has the stage's number as ``partition_idx``.

    Raises:
        ScheduleError: no schedule with this name around it.
        BuildError, ScheduleError, TraceError: see ``generate_pipeline_partition``.
    """
    end = _end(_require_schedule(sch), stop_at)
    places = list(_cuts_below(sch, end))
    root = end.mod
    if isinstance(root, PartitionedModule):
        raise ScheduleError("it is partitioned already; give the schedule that it came from", path=end.path)
    if not places:
        program = Program(root, (Stage(0, root),))
    else:
        program = Partitioner(root, places, None).first_program(_inputs_of(end))
    staged = _schedule_of_stages(end, program, starting_stage_id)
    top = staged.mod
    assert isinstance(top, PartitionedModule)
    return top, starting_stage_id + len(program.stages)


def add_partition_notation(sch: Schedule, idx: int) -> None:
    """Set ``partition_idx`` on a schedule and all schedules below it.

    Args:
        sch: Schedule of a stage, or of any module.
        idx: Number of the stage.
    """
    for _, handle in _require_schedule(sch).named_schedules():
        handle.metadata.partition_idx = idx


def build_pipeline_model(sch: Schedule, target: str | None = "torch", **kwargs: Any) -> Engine:
    """Make the target's ``"pipeline_engine"`` of the schedule's stages, each in its ``"pipeline_stage"``: ``slapo.build``.

    Hooks of the whole model move: forward-pre and backward hooks to the first stage, forward hooks to the last.

    Args:
        sch: Any handle of the schedule, or what ``generate_pipeline_partition`` returned.
        target: Name of an installed dialect; None gives the plain module.
        **kwargs: For ``slapo_core.build``, the plugins and the dialect: ``optimizer=``, ``microbatches=`` and others.

    Returns:
        An engine; it unpacks as ``module, optimizer``.

    Raises:
        UnknownNameError: no such target.
        BuildError: see ``slapo_core.build``.
    """
    return build(sch, target, **kwargs)


def partitioned_program(schedule: Schedule) -> Program | None:
    """Return the program of a schedule of stages; None for any other.

    Raises:
        BuildError: steps were taken on its stages; a program for other shapes would lose them.
    """
    module = schedule.root_module
    if not isinstance(module, PartitionedModule):
        return None
    stages = {"", *(module.name_of(stage.index) for stage in module.program.stages)}
    if late := [step for step in schedule.journal.steps[module.num_steps :] if step.path in stages]:
        raise BuildError(f"{late[0]} was taken on a whole stage; take it before generate_pipeline_partition")
    return module.program


def _require_schedule(sch: Any) -> Schedule:
    if not isinstance(sch, Schedule):
        raise BuildError(f"cannot partition a {type(sch).__name__}; give what create_schedule returned")
    return sch


def _schedule_of_stages(sch: Schedule, program: Program, start: int) -> Schedule:
    """Return a schedule of the stages, numbered from ``start``."""
    top = PartitionedModule(program, lambda index: f"submod_{start + index}")
    top.num_steps = len(sch.journal)
    staged = sch.stage_schedule(top, program)
    for stage in program.stages:
        add_partition_notation(staged[top.name_of(stage.index)], start + stage.index)
    return staged


def _end(sch: Schedule, stop_at: str | None) -> Schedule:
    end = sch
    while end.parent is not None and (stop_at is None or stop_at not in (end.path, end.name)):
        end = end.parent
    if stop_at not in (None, end.path, end.name):
        raise ScheduleError(f"no schedule around {sch.path!r} is named {stop_at!r}; give a path or name of one", path=sch.path)
    return end


def _cuts_below(sch: Schedule, end: Schedule) -> Iterator[str]:
    """Yield the cuts inside the module and those in the graphs of the modules around it, with paths below ``end``."""
    around = {sch.path[:place] for place, letter in enumerate(sch.path) if letter == "."} | ({""} if sch.path else set())
    around = {path for path in around if _is_inside(path, end.path)}
    for cut in cuts_of_steps(sch.journal):
        at_mark = isinstance(cut_where(cut), int)
        inside = _is_inside(cut, sch.path) and (at_mark or cut != sch.path)
        beside = (cut if at_mark else cut.rpartition(".")[0]) in around
        if inside or (beside and (at_mark or cut != end.path)):
            yield Cut(cut[len(end.path) + 1 :] if end.path else cut, cut_where(cut))


def _is_inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _inputs_of(sch: Schedule) -> dict[str, Any] | None:
    """Return the arguments by name with which the model calls the module on the example inputs; None without such inputs."""
    root, module, inputs = sch.root_module, sch.mod, sch.example_inputs
    if inputs is None:
        return None
    if module is root:
        return named_batch(root, inputs)
    found: list[tuple[Any, Any]] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        found.append((args, kwargs))

    sandbox = Sandbox(root, inputs, fake=True)
    with sandbox.open(grad=True), module.register_forward_pre_hook(note, prepend=True, with_kwargs=True):
        args, kwargs = tree_map_only(torch.Tensor, sandbox.enter_input, split_inputs(inputs, root))
        root(*args, **kwargs)
    if not found:
        raise ScheduleError(
            f"{sch.path!r} is not called when the model runs on the example inputs; give another module", path=sch.path
        )

    def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)

    args, kwargs = tree_map_only(torch.Tensor, zeros_like, found[0])
    return named_inputs(module, args, kwargs)
