"""``pipeline``: all cuts in one step."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from slapo_core import Primitive, Schedule, ScheduleError, get_logger, paths
from slapo_tracing.tracers import Leaves, named_leaves

from .balance.cut_search import StageTable, given_cuts, search_cuts
from .balance.unit_costs import BALANCES
from .cut_pipeline_stage import CutPipelineStagePrimitive
from .partition.partitioner import CACHED_TRACE, pipeline_ranks
from .tracing.cuts import cuts_of_steps
from .tracing.flat_trace import CachedTrace, named_batch, unshared_tensors
from .tracing.root_hooks import is_indivisible, without_root_hooks

NAME = "pipeline"

Boundaries = Sequence[str] | Callable[[str, nn.Module], bool]


class PipelinePrimitive(Primitive):
    """Cut the whole model into pipeline stages: after given modules, or so that the largest stage costs least.

    The stages may be uneven, and end at any depth, in an encoder as well as in a decoder. Stages end between blocks: the
    members of module lists, and the modules before and after these. If there are too few places, blocks are divided where no
    more bytes cross than between blocks. Of all cuts with the least largest cost, those that send the fewest bytes are taken,
    then the most even ones. Cuts that the partitioner refuses are skipped. The costs need no real weights,
    and are those of the example inputs as one micro-batch.

    ``sch.metadata.primitives["pipeline"]`` is the ``StageTable`` of the stages, which is also logged.

    Rewrite:
        h.0 .. h.11  -->  [h.0 .. h.3] [h.4 .. h.7] [h.8 .. h.11]        sch.pipeline(3)

    Args:
        stages: Number of stages; default: one per rank of the mesh's ``pp`` axis. It must be a multiple of these ranks.
        boundaries: Alternative to ``stages``: the modules after which a stage ends, as paths below the model or globs; or a
            function of a module's path and the module that returns whether a stage ends after it. For the module that runs
            last, True ends the last stage.
        balance: Cost of a stage. ``"parameters"``: bytes of parameters; a tied one counts where it is used first. ``"flops"``:
            FLOPs of its forward. ``"memory"``: four times the bytes of each trained parameter, for the weight, the gradient
            and two optimizer states in the weight's dtype, and the bytes of each frozen one; plus the bytes its forward saves
            for the backward, times the micro-batches in flight under 1F1B, ``min(stages - stage, microbatches)``.
        microbatches: Micro-batches per batch, for ``"memory"``; default: the number of stages.
        leaf_modules: Modules that no stage ends in, such as a vision tower: one or several classes, class names or globs.

    Raises:
        ScheduleError: not the whole model, cut already, no example inputs, an invalid argument, or too many stages.
        TraceError: the model cannot be traced, or the partitioner refuses; see ``cut_pipeline_stage``.
    """

    name = NAME
    scope = "module"

    @staticmethod
    def check(
        schedule: Schedule,
        stages: int | None = None,
        boundaries: Boundaries | None = None,
        *,
        balance: str = "parameters",
        microbatches: int | None = None,
        leaf_modules: Leaves = None,
    ) -> tuple[StageTable, CachedTrace]:
        """Find the cuts; return their table and the trace for the build."""
        _check_model(schedule)
        _check_options(balance, microbatches)
        inputs = unshared_tensors(named_batch(schedule.mod, schedule.example_inputs))
        if boundaries is None:
            with without_root_hooks(schedule.mod):
                named = named_leaves(schedule.mod, leaf_modules, primitive=NAME)
                leaves = {path for path, module in schedule.mod.named_modules() if id(module) in named}
                return search_cuts(schedule.mod, inputs, _number(schedule, stages), balance, microbatches, leaves)
        if leaf_modules is not None:
            raise _error("both leaf_modules and boundaries are given, but boundaries say where stages end; give one of them")
        if stages is not None:
            raise _error("both stages and boundaries are given, but boundaries say how many stages there are; give one of them")
        policy = callable(boundaries)
        ends = _paths_of_policy(schedule, boundaries) if callable(boundaries) else _paths_of_entries(schedule, boundaries)
        for path in ends:
            CutPipelineStagePrimitive.check(schedule[path])
        with without_root_hooks(schedule.mod):
            table, kept = given_cuts(schedule.mod, inputs, ends, balance, microbatches, all_end=not policy)
        _check_ranks(schedule, len(table.stages))
        return table, kept

    @staticmethod
    def apply(
        schedule: Schedule,
        stages: int | None = None,
        boundaries: Boundaries | None = None,
        *,
        balance: str = "parameters",
        microbatches: int | None = None,
        leaf_modules: Leaves = None,
        checked: tuple[StageTable, CachedTrace],
    ) -> None:
        """Cut the model at the modules that ``check`` found."""
        table, kept = checked
        for path in table.cuts:
            schedule[path].cut_pipeline_stage()
        schedule.metadata.primitives.update({NAME: table, CACHED_TRACE: kept})
        if not dist.is_initialized() or dist.get_rank() == 0:
            get_logger().info("pipeline: %d stages by %s\n%s", len(table.stages), table.balance, table)


def _error(message: str) -> ScheduleError:
    return ScheduleError(message, primitive=NAME)


def _check_model(schedule: Schedule) -> None:
    if schedule.path:
        message = "stages are parts of the whole model; call it on the top schedule, sch.get_top_schedule()"
        raise ScheduleError(message, path=schedule.path, primitive=NAME)
    if done := cuts_of_steps(schedule.journal):
        where = f"at {str(done[0])!r}" if done[0] else "by a mark of its own"
        raise _error(f"the model is cut already, {where}; undo that, or make all cuts with cut_pipeline_stage")
    if schedule.example_inputs is None:
        raise _error("a model is cut by tracing it; give create_schedule example_inputs=, one batch")
    if is_indivisible(schedule.mod, schedule.mod):
        raise _error("the whole model is wrapped and runs as one piece; call pipeline before what wraps it")


def _check_options(balance: str, microbatches: int | None) -> None:
    if balance not in BALANCES:
        raise _error(
            f"balance is {balance!r}; {_suggestion(str(balance), BALANCES)}available: {', '.join(map(repr, BALANCES))}"
        )
    if microbatches is not None and not _is_count(microbatches):
        raise _error(f"microbatches is {microbatches!r}; give how many a batch is cut into, at least 1")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _number(schedule: Schedule, stages: int | None) -> int:
    number = pipeline_ranks(schedule.mesh) if stages is None else stages
    if number is None:
        raise _error(
            "give stages= or boundaries=, or create_schedule a mesh with an axis 'pp', one stage per rank of which is made"
        )
    if not _is_count(number):
        raise _error(f"stages is {number!r}; give how many there are to be, at least 1")
    _check_ranks(schedule, number)
    return number


def _check_ranks(schedule: Schedule, number: int) -> None:
    ranks = pipeline_ranks(schedule.mesh) or 1
    if number % ranks:
        raise _error(
            f"{number} stages cannot be shared equally by the {ranks} ranks of the mesh's axis 'pp'; take a multiple of it"
        )


def _paths_of_entries(schedule: Schedule, boundaries: Sequence[str]) -> list[str]:
    """Return the paths of the modules that the entries match."""
    given = "paths or globs of modules after which a stage ends, e.g. ['h.3', 'h.7']"
    if isinstance(boundaries, str) or not isinstance(boundaries, Sequence):
        raise _error(f"boundaries is {boundaries!r}; give a list of {given}")
    found: dict[str, str] = {}
    for entry in boundaries:
        if not isinstance(entry, str):
            raise _error(f"boundaries has {entry!r}, which is another module in each model; give {given}")
        matched = [path for path, _ in paths.select(schedule.mod, entry)] if entry else [""]
        if not matched:
            names = [path for path, _ in schedule.mod.named_modules() if path]
            raise _error(f"boundaries has {entry!r}, which matches no module; {_suggestion(entry, names)}give {given}")
        for path in matched:
            if path in found:
                by = f"by {found[path]!r} and {entry!r}" if entry != found[path] else f"as {entry!r}"
                raise _error(f"boundaries names {path!r} twice, {by}; name it once")
            found[path] = entry
    return list(found)


def _paths_of_policy(schedule: Schedule, accepts: Callable[[str, nn.Module], bool]) -> list[str]:
    """Return the paths of the modules that a policy accepts."""
    found = [path for path, module in schedule.mod.named_modules() if path and accepts(path, module)]
    if not found:
        raise _error("boundaries accepts no module; let the function return True for those after which a stage ends")
    return found


def _suggestion(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""
