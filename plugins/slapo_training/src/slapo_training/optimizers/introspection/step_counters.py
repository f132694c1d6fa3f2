"""Step counters of an optimizer: advanced to probe its steps after a warm-up, and put back between calls that are one step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from .nested_optimizers import Optimizer, optimizers_in

Counts = dict[tuple[int, Any], float]


def counts(optimizer: Optimizer) -> Counts:
    """Return the numbers in state, groups and attributes of an optimizer and those inside it, by table and key."""
    return {(id(table), key): float(value) for table, key, value in _numbers(optimizer)}


def advance(optimizer: Optimizer, before: Counts, steps: int) -> None:
    """Add steps to every number that the last step raised by one.

    Args:
        optimizer: The optimizer, one step after ``before``.
        before: Its numbers, as ``counts`` returned them.
        steps: Number of steps.
    """
    moved = set[int]()
    for table, key, value in list(_numbers(optimizer)):
        if float(value) - before.get((id(table), key), 0.0) != 1:
            continue
        if not isinstance(value, torch.Tensor):
            table[key] = value + steps
        elif id(value) not in moved:
            moved.add(id(value))
            value.detach().add_(steps)


class OneStep:
    """Several calls of an optimizer's ``step`` that are one step, each of other parameters.

    Numbers that it keeps in attributes, as a count of steps, would advance in each call: before all calls but the first they
    are put back.

    Args:
        optimizer: The optimizer, before the first call.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        tables = [vars(each) for each in optimizers_in(optimizer)]
        self._before = [
            (table, key, copy.deepcopy(value)) for table in tables for key, value in table.items() if _is_number(value)
        ]

    def again(self) -> None:
        """Put the numbers back for another call."""
        for table, key, value in self._before:
            table[key] = copy.deepcopy(value)


def _numbers(optimizer: Optimizer) -> Iterator[tuple[Any, Any, Any]]:
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
