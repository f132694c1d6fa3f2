"""Step counters of an optimizer: advanced to probe steps after a warm-up, and restored between calls that form one step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from .nested_optimizers import Optimizer, optimizers_in

Counts = dict[tuple[int, Any], float]


def counts(optimizer: Optimizer) -> Counts:
    """Return the numbers in state, groups and attributes of an optimizer and nested ones, by table and key."""
    return {(id(table), key): float(value) for table, key, value in _counters(optimizer)}


def advance(optimizer: Optimizer, before: Counts, steps: int) -> None:
    """Add ``steps`` to each number that the last step increased by one since ``before``, the result of ``counts``."""
    moved = set[int]()
    for table, key, value in list(_counters(optimizer)):
        if float(value) - before.get((id(table), key), 0.0) != 1:
            continue
        if not isinstance(value, torch.Tensor):
            table[key] = value + steps
        elif id(value) not in moved:
            moved.add(id(value))
            value.detach().add_(steps)


class OneStep:
    """Several calls of ``step`` that form one step, each of other parameters.

    Numbers in attributes, e.g. a count of steps, would advance in each call. They are restored before each call but the first.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        tables = [vars(each) for each in optimizers_in(optimizer)]
        self._before = [
            (table, key, copy.deepcopy(value)) for table in tables for key, value in table.items() if _is_number(value)
        ]

    def restore_counters(self) -> None:
        """Restore the numbers for another call."""
        for table, key, value in self._before:
            table[key] = copy.deepcopy(value)


def _counters(optimizer: Optimizer) -> Iterator[tuple[Any, Any, Any]]:
    for each in optimizers_in(optimizer):
        states = [state for state in each.state.values() if isinstance(state, dict)]
        tables: list[Any] = [vars(each), each.state, *each.param_groups, *states]
        for table in tables:
            for key, value in table.items():
                if _is_number(value):
                    yield table, key, value


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)
