"""Find parts of the graphs below a schedule; what is not traced yet is traced first."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import fx

from . import matching
from .errors import ScheduleError, TraceError
from .logger import get_logger
from .patterns import Pattern

if TYPE_CHECKING:
    from .schedule import Schedule


def find_node(schedule: Schedule, wanted: str | Callable[[fx.Node], bool]) -> list[matching.Handle]:
    """Nodes of the graphs from a schedule's module down; where nothing there is traced, ``trace`` is applied first.

    Args:
        schedule: Of the module.
        wanted: A regular expression that the path of a called module matches fully, or a function of a node.

    Raises:
        TraceError: the module is not traced and cannot be.
    """
    return _found(schedule, wanted, lambda: matching.find_node(schedule.mod, wanted, schedule.path))


def find_subgraph(schedule: Schedule, pattern: Callable[..., Any] | Pattern) -> list[matching.Match]:
    """Occurrences of a pattern in the same graphs; they never overlap.

    Args:
        schedule: Of the module.
        pattern: A function of tensors or a ``Pattern``.

    Raises:
        TraceError: the module is not traced and cannot be.
    """
    return _found(schedule, pattern, lambda: matching.find_subgraph(schedule.mod, pattern, schedule.path))


def matches_of(schedule: Schedule, subgraph: Any, primitive: str) -> list[Any]:
    """A list of the matches that a primitive was given: one, several, a node, or what ``find`` takes.

    Raises:
        ScheduleError: none of these, or nothing is found.
    """
    if isinstance(subgraph, str):
        subgraph = [[handle] for handle in find_node(schedule, subgraph)]
    elif isinstance(subgraph, (FunctionType, Pattern)):
        subgraph = find_subgraph(schedule, subgraph)
    given = [[subgraph]] if _is_node(subgraph) else [subgraph] if _is_match(subgraph) and subgraph else subgraph
    if not isinstance(given, (list, tuple)) or not all(map(_is_match, given)):
        raise ScheduleError(
            f"{subgraph!r:.60} is no subgraph; give what sch.find() returned", path=schedule.path, primitive=primitive
        )
    if not given or not all(given):
        raise ScheduleError(
            "the subgraph is empty: nothing was found; give a match of sch.find()", path=schedule.path, primitive=primitive
        )
    return list(given)


def _is_match(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_node, value))


def _is_node(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], fx.Node)


def _found(schedule: Schedule, wanted: Any, search: Callable[[], list[Any]]) -> list[Any]:
    if not any(True for _ in matching.traced_modules(schedule.mod)):
        _trace(schedule)
    found = search()
    if not found and not isinstance(schedule.mod, fx.GraphModule):  # only parts of it were traced
        _trace(schedule)
        found = search()
    if not found:
        count = sum(1 for _ in matching.traced_modules(schedule.mod))
        what = f"find({schedule.path!r}): {wanted!r} matches nothing in {count} graph{'s' if count > 1 else ''}"
        get_logger().warning("%s; print(sch.mod.graph) shows what is there", what)
    return found


def _trace(schedule: Schedule) -> None:
    """Trace a module and all inside of it; what cannot be a graph stays whole."""
    try:
        schedule.apply("trace")
    except TraceError as err:
        get_logger().debug("find(%r): the modules inside stay whole: %s", schedule.path, err)
        schedule.apply("trace", recursive=False)
