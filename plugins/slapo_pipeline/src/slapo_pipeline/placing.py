"""From a number of stages to the modules that end them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import nn

from slapo_core.errors import ScheduleError, TraceError
from slapo_core.logger import get_logger

from .balance import Placement, best_placement, placements
from .costs import Costs
from .partition import Partitioner
from .places import Units, blocks, is_member, taken_apart
from .stage_table import PlacedStage, StageTable

_TRIES = 16
"""Placements that the partitioner may refuse before the search ends."""


def placed_at(
    root: nn.Module,
    inputs: Mapping[str, Any],
    ends: Sequence[str],
    balance: str,
    microbatches: int | None,
    *,
    all_end: bool = True,
) -> StageTable:
    """The stages that end after given modules.

    Args:
        root: The model.
        inputs: A batch, by name.
        ends: Paths, in any order.
        balance: What to show of each stage; see ``Costs``.
        microbatches: How many a batch has; default: as many as there are stages.
        all_end: Whether one after which nothing runs is an error; else it ends the last stage.

    Raises:
        ScheduleError: one does not run, or nothing runs between two or after the last.
        TraceError: the partitioner refuses them.
    """
    units = Units(root, inputs, ends, ends, all_end=all_end)
    cuts = tuple(range(1, len(units)))
    if (refusal := units.refusal(cuts)) is not None:
        raise refusal
    return _table(units, Costs(units, balance, len(units), microbatches or len(units)), cuts)


def placed(root: nn.Module, inputs: Mapping[str, Any], stages: int, balance: str, microbatches: int | None) -> StageTable:
    """The stages whose largest cost is least.

    Args:
        root: The model.
        inputs: A batch, by name.
        stages: How many.
        balance: What to balance; see ``Costs``.
        microbatches: How many a batch has; default: as many as there are stages.

    Raises:
        ScheduleError: the model has too few places where a stage can end.
        TraceError: the model cannot be traced, or the partitioner refuses all placements.
    """
    whole, widest = blocks(root), None
    while True:
        units = Units(root, inputs, whole)
        crossing = units.crossing()
        widest = _widest(units, crossing) if widest is None else widest
        refused = [cut for cut, size in enumerate(crossing, 1) if size is None]
        wide = [cut for cut, size in enumerate(crossing, 1) if size is not None and widest is not None and size > widest]
        places = len(crossing) - len(refused) - len(wide)
        if places >= stages - 1:
            break
        if places + len(refused) >= stages - 1 and (refusal := units.refusal(refused[:1])) is not None:
            raise refusal
        inner = [part for path in whole for part in taken_apart(root, path)]
        if inner == whole:
            raise _too_few(stages, places)
        whole = inner
    costs = Costs(units, balance, stages, microbatches or stages)
    found = placements(costs, [size or 0 for size in crossing], stages, [*refused, *wide])
    first: ScheduleError | TraceError | None = None
    for placement in islice(found, _TRIES):
        err = units.refusal(placement.cuts) or _refusal(units, placement.cuts)
        if err is None:
            _warn_of_refused(units, costs, crossing, placement, wide)
            return _table(units, costs, placement.cuts)
        first = first or err
    assert first is not None
    raise first


def _widest(units: Units, crossing: Sequence[int | None]) -> int | None:
    """Bytes that cross between the members of lists; None where no stage can end at any."""
    sizes = [size for path, size in zip(units.paths, crossing, strict=True) if size is not None and is_member(units.root, path)]
    return max(sizes, default=None)


def _warn_of_refused(units: Units, costs: Costs, crossing: Sequence[int | None], taken: Placement, wide: Sequence[int]) -> None:
    """Say what would be better, were it not refused."""
    better = best_placement(costs, [size or 0 for size in crossing], len(taken.cuts) + 1, wide)
    if better is None or better.largest >= taken.largest:
        return
    cut = next((cut for cut in better.cuts if crossing[cut - 1] is None), None)
    refusal = units.refusal(better.cuts if cut is None else [cut])
    more = f"{taken.largest / better.largest - 1:.0%}" if better.largest else "inf"
    where = f" after {units.paths[cut - 1]!r}" if cut is not None else ""
    message = "pipeline: the largest stage costs %s more than it could, as no stage can end%s: %s"
    get_logger().warning(message, more, where, refusal)


def _too_few(stages: int, places: int) -> ScheduleError:
    what = f"the model's blocks end at {places} places" if places != 1 else "the model's blocks end at 1 place"
    return ScheduleError(
        f"{stages} stages need {stages - 1} cuts, but {what} where a stage can end; take fewer stages, or give boundaries=",
        primitive="pipeline",
    )


def _refusal(units: Units, cuts: Sequence[int]) -> ScheduleError | TraceError | None:
    """Why the partitioner refuses, where it takes less of the model apart than it was for finding places."""
    paths = [units.paths[cut - 1] for cut in cuts]
    if _parents(paths) == _parents(units.whole):
        return None
    try:
        Partitioner(units.root, paths, None).program(units.root.training, units.inputs)
    except (ScheduleError, TraceError) as err:
        return err
    return None


def _parents(paths: Iterable[str]) -> Collection[str]:
    return {path[:end] for path in paths for end, letter in enumerate(path) if letter == "."}


def _table(units: Units, costs: Costs, cuts: Sequence[int]) -> StageTable:
    crossing = units.crossing_at(cuts)
    ends = [0, *cuts, len(units)]
    calls = [(units.unit_of(index), str(node.target)) for index, node in enumerate(units.nodes) if node.op == "call_module"]
    stages = []
    for stage, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        run = [path for unit, path in calls if begin <= unit < end]
        row = PlacedStage(
            first=run[0],
            last=run[-1],
            parameters=costs.parameters.of(begin, end),
            parameter_bytes=costs.bytes.of(begin, end),
            cost=costs(stage, begin, end),
            received=crossing[stage - 1] if stage else 0,
        )
        stages.append(row)
    return StageTable(costs.balance, tuple(stages), tuple(units.paths[cut - 1] for cut in cuts))
