"""Step counters of an optimizer, which are advanced to probe its steps after a warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .tree import Optimizer, optimizers_in

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


def _numbers(optimizer: Optimizer) -> Iterator[tuple[Any, Any, Any]]:
    for each in optimizers_in(optimizer):
        states = [state for state in each.state.values() if isinstance(state, dict)]
        tables: list[Any] = [vars(each), each.state, *each.param_groups, *states]
        for table in tables:
            for key, value in table.items():
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if is_number or (isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()):
                    yield table, key, value
