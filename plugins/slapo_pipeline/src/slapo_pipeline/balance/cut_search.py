"""Search for the modules that end a given number of stages, so that the largest stage costs least, and their table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

from torch import nn

from slapo_core import ScheduleError, TraceError, get_logger

from ..partition.partitioner import Partitioner
from ..tracing.flat_trace import CachedTrace, inlined_paths
from .cut_candidates import Units, blocks, inner_blocks, is_member
from .optimal_cuts import CutChoice, best_cuts, cuts_by_cost
from .unit_costs import Costs

_MAX_REFUSALS = 16
"""Choices of cuts that the partitioner may refuse before the search ends."""


def given_cuts(
    root: nn.Module,
    inputs: Mapping[str, Any],
    ends: Sequence[str],
    balance: str,
    microbatches: int | None,
    *,
    all_end: bool = True,
) -> tuple[StageTable, CachedTrace]:
    """Return the stages that end after given modules, and the trace they were found in.

    Args:
        ends: Paths of the modules, in any order.
        microbatches: Micro-batches per batch; default: the number of stages.
        all_end: Whether a module with nothing after it is an error; else it ends the last stage.

    Raises:
        ScheduleError: a module does not run, or nothing runs between two of them or after the last.
        TraceError: the partitioner refuses these stages.
    """
    units = Units(root, inputs, ends, ends, all_end=all_end)
    cuts = tuple(range(1, len(units)))
    if (refusal := units.refusal(cuts)) is not None:
        raise refusal
    return _table(units, Costs(units, balance, len(units), microbatches or len(units)), cuts), units.cached_trace()


def search_cuts(
    root: nn.Module,
    inputs: Mapping[str, Any],
    stages: int,
    balance: str,
    microbatches: int | None,
    leaves: Collection[str] = (),
) -> tuple[StageTable, CachedTrace]:
    """Return the stages whose largest cost (see ``Costs``) is least, and the trace they were found in.

    No stage ends in one of the ``leaves``. There are as many micro-batches as stages by default.

    Raises:
        ScheduleError: the model has too few places where a stage can end.
        TraceError: the model cannot be traced, or the partitioner refuses all choices of cuts.
    """
    search = _Search(root, inputs, stages, balance, microbatches or stages, leaves)
    level, choice = search.search_blocks()
    while (whole := _split_largest_stage(level, choice)) != level.units.whole:
        try:
            finer = search.level(whole)
            better = finer.best()
        except (ScheduleError, TraceError):
            break  # the blocks cannot be divided; keep the cuts between them
        if better.largest >= choice.largest:
            break
        level, choice = finer, better
    level.warn_of_refused(choice)
    return _table(level.units, level.costs, choice.cuts), level.units.cached_trace()


@dataclass
class _Search:
    """The search for one choice of cuts, at levels that divide the blocks further and further."""

    root: nn.Module
    inputs: Mapping[str, Any]
    stages: int
    balance: str
    microbatches: int
    leaves: Collection[str]
    widest: int | None = None
    """Largest number of bytes that cross between members of module lists; a cut that more bytes cross is not taken."""

    def level(self, whole: Sequence[str]) -> _Level:
        """Return the level at which these blocks are whole."""
        return _Level(self, Units(self.root, self.inputs, whole))

    def search_blocks(self) -> tuple[_Level, CutChoice]:
        """Return the best cuts between blocks; blocks are divided only while there are too few places."""
        level = self.level(blocks(self.root, self.leaves))
        self.widest = _largest_crossing(level)
        while True:
            missing = self.stages - 1 - level.num_places
            if missing <= 0:
                return level, level.best()
            if missing <= len(level.refused) and (refusal := level.units.refusal(level.refused[:1])) is not None:
                raise refusal
            whole = level.units.whole
            inner = [part for path in whole for part in inner_blocks(self.root, path, self.leaves)]
            if inner == whole:
                raise _too_few_places(self.stages, level.num_places)
            try:
                level = self.level(inner)
            except TraceError as err:
                raise _too_few_places(self.stages, level.num_places) from err


class _Level:
    """The model as a sequence of units, and the costs of stages of these units."""

    def __init__(self, search: _Search, units: Units) -> None:
        self.search, self.units = search, units
        self.crossing = units.crossing_bytes()
        self.sent = [size or 0 for size in self.crossing]
        self.refused = [cut for cut, size in enumerate(self.crossing, 1) if size is None]

    @property
    def wide(self) -> list[int]:
        """Cuts that more bytes cross than any place between members of module lists."""
        widest = self.search.widest
        return [cut for cut, size in enumerate(self.sent, 1) if widest is not None and size > widest]

    @property
    def num_places(self) -> int:
        return len(self.crossing) - len(self.refused) - len(self.wide)

    @cached_property
    def costs(self) -> Costs:
        return Costs(self.units, self.search.balance, self.search.stages, self.search.microbatches)

    def best(self) -> CutChoice:
        """Return the best cuts that are not refused; raise the partitioner's error for the best if all are."""
        first: ScheduleError | TraceError | None = None
        for choice in islice(
            cuts_by_cost(self.costs, self.sent, self.search.stages, [*self.refused, *self.wide]), _MAX_REFUSALS
        ):
            err = self.units.refusal(choice.cuts) or _refusal(self.units, choice.cuts)
            if err is None:
                return choice
            first = first or err
        raise first or _too_few_places(self.search.stages, self.num_places)

    def warn_of_refused(self, taken: CutChoice) -> None:
        """Warn if refused cuts would have a smaller largest cost."""
        better = best_cuts(self.costs, self.sent, self.search.stages, self.wide)
        if better is None or better.largest >= taken.largest:
            return
        cut = next((cut for cut in better.cuts if cut in self.refused), None)
        refusal = self.units.refusal(better.cuts if cut is None else [cut])
        more = taken.largest / better.largest - 1 if better.largest else float("inf")
        where = f" after {self.units.paths[cut - 1]!r}" if cut is not None else " there"
        message = "pipeline: the largest stage costs %.0f%% more than it could, as no stage can end%s: %s"
        get_logger().warning(message, more * 100, where, refusal)


def _split_largest_stage(level: _Level, choice: CutChoice) -> list[str]:
    """Return the blocks, with those of the most expensive stage divided that cost more than the average stage."""
    units, ends = level.units, [0, *choice.cuts, len(level.units)]
    costs = [level.costs(stage, begin, end) for stage, (begin, end) in enumerate(pairwise(ends))]
    largest = costs.index(choice.largest)
    expensive = {
        unit
        for unit in range(ends[largest], ends[largest + 1])
        if level.costs(largest, unit, unit + 1) * len(costs) > sum(costs)
    }
    divided = {path for unit, path in units.calls() if unit in expensive}
    leaves = level.search.leaves
    return [part for path in units.whole for part in (inner_blocks(units.root, path, leaves) if path in divided else [path])]


def _largest_crossing(level: _Level) -> int | None:
    """Return the largest number of bytes that cross between members of module lists; None if no stage can end there."""
    units = level.units
    sizes = [
        size for path, size in zip(units.paths, level.crossing, strict=True) if size is not None and is_member(units.root, path)
    ]
    return max(sizes, default=None)


def _too_few_places(stages: int, places: int) -> ScheduleError:
    what = f"the model's blocks end at {places} places" if places != 1 else "the model's blocks end at 1 place"
    return ScheduleError(
        f"{stages} stages need {stages - 1} cuts, but {what} where a stage can end; take fewer stages, or give boundaries=",
        primitive="pipeline",
    )


def _refusal(units: Units, cuts: Sequence[int]) -> ScheduleError | TraceError | None:
    """Return the partitioner's error, or None. Needed only where the partitioner inlines fewer modules than the search did."""
    paths = [units.paths[cut - 1] for cut in cuts]
    if inlined_paths(paths) == inlined_paths(units.whole):
        return None
    try:
        Partitioner(units.root, paths, None).program(units.root.training, units.inputs)
    except (ScheduleError, TraceError) as err:
        return err
    return None


def _table(units: Units, costs: Costs, cuts: Sequence[int]) -> StageTable:
    crossing = units.sent_at(cuts)
    ends = [0, *cuts, len(units)]
    calls = units.calls()
    stages = []
    for stage, (begin, end) in enumerate(pairwise(ends)):
        run = [path for unit, path in calls if begin <= unit < end]
        row = StageRow(
            first=run[0],
            last=run[-1],
            parameters=costs.parameters.of(begin, end),
            parameter_bytes=costs.bytes.of(begin, end),
            cost=costs(stage, begin, end),
            received=crossing[stage - 1] if stage else 0,
        )
        stages.append(row)
    return StageTable(costs.balance, tuple(stages), tuple(units.paths[cut - 1] for cut in cuts))


_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True)
class StageRow:
    """One stage, for the example inputs as one micro-batch.

    Args:
        first: Path of the first module it runs.
        last: Path of the last.
        parameters: Number of elements of its parameters; a shared parameter counts in each of its stages.
        parameter_bytes: Bytes of its parameters.
        cost: The balanced cost: bytes of the parameters that are used here first, FLOPs of a forward, or bytes of memory.
        received: Bytes it receives from the stage before.
    """

    first: str
    last: str
    parameters: int
    parameter_bytes: int
    cost: int
    received: int


@dataclass(frozen=True)
class StageTable:
    """The stages in order; printed as a table.

    Args:
        balance: Kind of the costs: ``"parameters"``, ``"flops"`` or ``"memory"``.
        stages: One row per stage.
        cuts: Paths of the modules that end all stages but the last.
    """

    balance: str
    stages: tuple[StageRow, ...]
    cuts: tuple[str, ...]

    def __str__(self) -> str:
        cost = {"flops": "forward FLOPs", "memory": "memory"}.get(self.balance)
        rows = [["stage", "from", "to", "parameters", "their size", *([cost] if cost else []), "receives"]]
        for index, stage in enumerate(self.stages):
            words = [
                str(index),
                stage.first,
                stage.last,
                _with_prefix(stage.parameters),
                f"{_with_prefix(stage.parameter_bytes)}B",
            ]
            words += [_with_prefix(stage.cost) + ("B" if self.balance == "memory" else "")] if cost else []
            rows.append([*words, f"{_with_prefix(stage.received)}B"])
        return "\n".join(_lines(rows))


def _with_prefix(amount: int) -> str:
    """Format a number with three digits and a decimal prefix: ``1.23 M``."""
    value, prefix = float(amount), 0
    while value >= 999.5 and prefix + 1 < len(_PREFIXES):
        value, prefix = value / 1000, prefix + 1
    return f"{value:.3g} {_PREFIXES[prefix]}"


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ">", "<", "<", *(">" for _ in widths[3:])
    return ["  ".join(f"{word:{side}{width}}" for word, side, width in zip(row, sides, widths, strict=True)) for row in rows]
