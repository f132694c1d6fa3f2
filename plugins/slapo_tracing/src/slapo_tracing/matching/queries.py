"""Queries that search the graphs below a schedule, and trace modules that are not traced yet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any

from torch import fx, nn

from slapo_core import Schedule, ScheduleError, TraceError, get_logger

from ..tracers.selection import is_container, trace_in_place
from . import matcher
from .patterns import Pattern


def find_node(schedule: Schedule, regex_or_pattern_fn: str | Callable[[fx.Node], bool]) -> list[matcher.Handle]:
    """Return nodes of the graphs below a schedule. If nothing there is traced, ``trace`` is applied first.

    ``[[node] for node in ...]`` are as many matches for ``replace``; the list itself is one match.

    Args:
        schedule: The schedule of the module to search.
        regex_or_pattern_fn: A regular expression that the path of a called module matches fully, or a function of a node.

    Returns:
        Pairs of the path of a traced module and a node of its graph.

    Raises:
        ScheduleError: neither a regular expression nor a function.
        TraceError: the module is not traced and cannot be.
    """
    matcher.check_query(regex_or_pattern_fn)
    search = lambda: matcher.find_node(schedule.mod, regex_or_pattern_fn, schedule.path)  # noqa: E731
    return _search_graphs(schedule, regex_or_pattern_fn, search)


def find_subgraph(schedule: Schedule, pattern_fn: Callable[..., Any] | Pattern) -> list[matcher.Match]:
    """Return the occurrences of a pattern in the same graphs; they never overlap.

    If nothing was traced before, and only a flat graph contains the pattern, since it spans several modules,
    ``trace(flatten=True)`` is applied.

    Args:
        schedule: The schedule of the module to search.
        pattern_fn: A function of tensors, in which ``slapo.call_module(name, ...)`` stands for modules, or a ``Pattern``.

    Raises:
        ScheduleError: the pattern is invalid.
        TraceError: the module is not traced and cannot be.
    """
    compiled = matcher.CompiledPattern(pattern_fn)
    search = lambda: matcher.find_subgraph(schedule.mod, compiled, schedule.path)  # noqa: E731
    return _search_graphs(schedule, pattern_fn, search, lambda flat: len(matcher.find_subgraph(flat, compiled)))


def find(schedule: Schedule, regex_or_pattern_fn: str | Callable[..., Any] | Pattern) -> list[Any]:
    """Return ``find_node`` of a regular expression, or ``find_subgraph`` of a function of tensors or a ``Pattern``."""
    if isinstance(regex_or_pattern_fn, str):
        return find_node(schedule, regex_or_pattern_fn)
    return find_subgraph(schedule, regex_or_pattern_fn)


def matches_of(schedule: Schedule, subgraph: Any, primitive: str) -> list[Any]:
    """Return the list of matches that an argument of a primitive stands for; raise ``ScheduleError`` if there are none.

    Args:
        schedule: The schedule of the module to search.
        subgraph: One match, several, a node, or an argument of ``find``.
        primitive: Name of the primitive, for messages.
    """
    error = partial(ScheduleError, path=schedule.path, primitive=primitive)
    wanted = subgraph
    if isinstance(wanted, str):
        subgraph = [[handle] for handle in find_node(schedule, wanted)]
    elif isinstance(wanted, (FunctionType, Pattern)):
        subgraph = find_subgraph(schedule, wanted)
    if wanted is not subgraph and not subgraph:
        raise error(f"{_label(wanted)} matches nothing; print(sch.mod.graph) shows what is there")
    given = [[subgraph]] if _is_node(subgraph) else [subgraph] if _is_match(subgraph) and subgraph else subgraph
    if not isinstance(given, (list, tuple)) or not all(map(_is_match, given)):
        raise error(f"{subgraph!r:.60} is not a subgraph; give what sch.find() returned")
    if not given or not all(given):
        raise error("the subgraph is empty: nothing was found; give a match of sch.find()")
    return list(given)


def _label(wanted: Any) -> str:
    return wanted.__name__ if isinstance(wanted, FunctionType) else repr(wanted)


def _is_match(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_node, value))


def _is_node(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], fx.Node)


def _search_graphs(
    schedule: Schedule, wanted: Any, search: Callable[[], list[Any]], in_flat: Callable[[nn.Module], int] | None = None
) -> list[Any]:
    is_ours = not any(True for _ in matcher.traced_modules(schedule.mod))
    if is_ours:
        _trace_module(schedule)
    found = search()
    if not found and not _is_traced(schedule.mod):  # only parts of it were
        _trace_module(schedule)
        found = search()
    if found:
        return found
    count = sum(1 for _ in matcher.traced_modules(schedule.mod))
    flat = 0 if in_flat is None or is_container(schedule.mod) else _flat_count(schedule, in_flat)
    if flat and is_ours:
        schedule.apply("trace", flatten=True)
        return search()
    what = f"find({schedule.path!r}): {_label(wanted)} matches nothing in {count} graph{'s' if count > 1 else ''}"
    hint = f"trace(flatten=True) makes one of all, which has {flat}" if flat else "print(sch.mod.graph) shows what is there"
    get_logger().warning("%s; %s", what, hint)
    return found


def _is_traced(module: nn.Module) -> bool:
    return all(map(_is_traced, module.children())) if is_container(module) else isinstance(module, fx.GraphModule)


def _flat_count(schedule: Schedule, in_flat: Callable[[nn.Module], int]) -> int:
    """Return the number of matches in a flat graph of the module."""
    with suppress(TraceError, ScheduleError):
        return in_flat(trace_in_place(schedule, None, flatten=True))
    return 0


def _trace_module(schedule: Schedule) -> None:
    """Trace a module and the modules inside. If one of these cannot be traced, all of them stay whole."""
    try:
        schedule.apply("trace")
    except TraceError as err:
        get_logger().debug("find(%r): the modules inside stay whole: %s", schedule.path, err)
        schedule.apply("trace", recursive=False)
