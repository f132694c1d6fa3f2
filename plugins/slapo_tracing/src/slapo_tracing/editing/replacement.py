"""``replace`` for matched subgraphs: one call in place of each."""

from __future__ import annotations

from typing import Any

from torch import nn

from slapo_core import Primitive, Schedule, ScheduleError

from ..matching.queries import matches_of
from .graph_edit import check_replace, replace_subgraph


class SubgraphReplacement(Primitive):
    """Implementation of ``replace`` for matched subgraphs: put a module or a function in place of each."""

    name = "replace"

    @staticmethod
    def check(schedule: Schedule, new: Any, subgraph: Any, name: str | None = None) -> list[Any]:
        """Return the matches; refuse a module or function that does not fit."""
        if not (isinstance(new, nn.Module) or callable(new)):
            raise ScheduleError(f"{new!r} is neither a module nor a function", path=schedule.path, primitive="replace")
        matches = matches_of(schedule, subgraph, "replace")
        if len(matches) > 1 and isinstance(new, nn.Module) and [*new.parameters(), *new.buffers()]:
            shared = f"{len(matches)} subgraphs would share the weights of one {type(new).__name__}"
            hint = "replace each with its own module, or find them together, by a pattern that returns all their results"
            raise ScheduleError(f"{shared}; {hint}", path=schedule.path, primitive="replace")
        for match in matches:
            check_replace(schedule, match, new)
        return matches

    @staticmethod
    def apply(schedule: Schedule, new: Any, subgraph: Any, name: str | None = None, *, checked: list[Any]) -> None:
        for match in checked:
            replace_subgraph(schedule, match, new, name=name)
