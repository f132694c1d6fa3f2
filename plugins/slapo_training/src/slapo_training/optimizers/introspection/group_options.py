"""Options of parameter groups that two optimizers share; changes on one side are copied to the other."""

from __future__ import annotations

from typing import Any

from .nested_optimizers import Optimizer

Group = dict[str, Any]
_OWN = ("params", "param_names")


class GroupOptions:
    """Keeps the options of outer groups equal to those of an optimizer's groups.

    Args:
        inner: The optimizer; groups are known by index, since a load replaces them.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self.outer: list[Group] = []
        self._known: list[Group] = []

    def add(self, outer: Group) -> None:
        """Add an outer group, which takes the options of the optimizer's next group."""
        self.outer.append(outer)
        self._known.append({})
        self._take(len(self.outer) - 1)

    def exchange(self) -> None:
        """Copy options that changed since the last exchange; outer groups take precedence."""
        for number, outer in enumerate(self.outer):
            inner, known = self._inner.param_groups[number], self._known[number]
            for key in [*dict.fromkeys([*outer, *inner])]:
                if key in _OWN:
                    continue
                if key in outer and not _is_known(outer[key], known, key):
                    inner[key] = outer[key]
                elif key in inner:
                    outer[key] = inner[key]
            self._remember(number)

    def take_inner(self) -> None:
        """Copy the options of the optimizer's groups to the outer groups."""
        for number in range(len(self.outer)):
            self._take(number)

    def _take(self, number: int) -> None:
        inner = self._inner.param_groups[number]
        self.outer[number].update((key, value) for key, value in inner.items() if key not in _OWN)
        self._remember(number)

    def _remember(self, number: int) -> None:
        self._known[number] = {key: value for key, value in self._inner.param_groups[number].items() if key not in _OWN}


def _is_known(value: Any, known: Group, key: str) -> bool:
    if key not in known:
        return False
    before = known[key]
    if value is before:
        return True
    return type(value) is type(before) and isinstance(value, bool | int | float | str | tuple) and value == before
