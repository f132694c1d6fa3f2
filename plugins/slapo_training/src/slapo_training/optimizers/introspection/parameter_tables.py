"""Tables of an optimizer with parameters or their ids: its state, and sets, dicts and lists in attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .nested_optimizers import Optimizer, groups_in, optimizers_in, referenced_parameters

_PLAIN = (bool, int, float, str)
Successors = Callable[[nn.Parameter], Sequence[nn.Parameter]]
_Keys = Callable[[Any], list[Any]]


def plain_values_of(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[Any, ...]:
    """Return the plain values that an optimizer and its nested optimizers keep for a parameter, without tensors."""
    found: list[Any] = []
    for each in optimizers_in(optimizer):
        state = each.state.get(parameter)
        if isinstance(state, dict):
            found += [(name, repr(value)) for name, value in state.items() if isinstance(value, _PLAIN)]
        for name, table in _tables(each):
            for key in (parameter, id(parameter)):
                if _has_key(table, key):
                    value = table[key] if isinstance(table, Mapping) else True
                    found.append((name, repr(value) if isinstance(value, _PLAIN) else ""))
    return tuple(found)


def has_positions(optimizer: Optimizer) -> bool:
    """Return True if an optimizer has a list with one item per parameter of a group, or of all groups, by position."""
    for each in optimizers_in(optimizer):
        numbers = [len(group["params"]) for group in each.param_groups]
        tables = [table.items() for table in (vars(each), *each.param_groups)]
        lists = [value for table in tables for name, value in table if name not in _NO_POSITIONS]
        if any(number > _FEW and _is_positional(value, number) for number in {*numbers, sum(numbers)} for value in lists):
            return True
    return False


def replace_parameters(optimizer: Optimizer, successors: Successors) -> None:
    """Replace parameters and their ids in groups, state and tables; none of the optimizer's state has tensors.

    ``successors`` returns the parameters that replace one; none if the rank has none of it.
    """
    known = {id(parameter): parameter for parameter in _known_parameters(optimizer)}
    for group in groups_in(optimizer):
        group["params"] = [new for old in group["params"] for new in successors(old)]
    replace_in_tables(optimizer, list(known.values()), successors)
    for each in optimizers_in(optimizer):
        _replace(each.state, _new_keys(known, successors))


def replace_in_tables(optimizer: Optimizer, parameters: Sequence[nn.Parameter], successors: Successors) -> None:
    """Replace parameters and their ids in attributes of an optimizer and its nested ones: sets, lists, and keys of dicts."""
    new_keys = _new_keys({id(parameter): parameter for parameter in parameters}, successors)
    for each in optimizers_in(optimizer):
        for _, table in _tables(each):
            _replace(table, new_keys)


def has_state(optimizer: Optimizer) -> bool:
    """Return True if an optimizer or a nested one has tensors for its parameters, from a step or its construction."""
    for each in optimizers_in(optimizer):
        tables = [table for _, table in _tables(each) if isinstance(table, dict)]
        for table in (each.state, *tables):
            for key, state in table.items():
                values = state.values() if isinstance(state, dict) else [state]
                if isinstance(key, nn.Parameter) and any(isinstance(value, torch.Tensor | list | tuple) for value in values):
                    return True
    return False


_NO_POSITIONS = ("params", "param_names", "param_groups")
_FEW = 2


def _is_positional(value: Any, number: int) -> bool:
    return isinstance(value, list) and len(value) == number and not any(isinstance(item, nn.Parameter) for item in value)


def _tables(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups", "defaults") and isinstance(value, set | dict | list):
            yield name, value


def _has_key(table: Any, key: Any) -> bool:
    if not isinstance(table, list):
        kind = type(next(iter(table), None))  # a parameter and its id have the same hash; comparing them would compare tensors
        return kind is type(key) and key in table
    return any(item is key or (type(item) is int and type(key) is int and item == key) for item in table)


def _known_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    states = (key for each in optimizers_in(optimizer) for key in each.state if isinstance(key, nn.Parameter))
    return [*referenced_parameters(optimizer), *states]


def _new_keys(known: Mapping[int, nn.Parameter], successors: Successors) -> _Keys:
    def new_keys(key: Any) -> list[Any]:
        if isinstance(key, nn.Parameter) and id(key) in known:
            return list(successors(key))
        if type(key) is int and key in known:
            return [id(new) for new in successors(known[key])]
        return [key]

    return new_keys


def _replace(table: Any, new_keys: _Keys) -> None:
    if isinstance(table, list):
        table[:] = [new for item in table for new in new_keys(item)]
        return
    items = [(key, new_keys(key)) for key in table]
    if all(len(new) == 1 and new[0] is key for key, new in items):
        return
    if isinstance(table, set):
        table.clear()
        table.update(each for _, new in items for each in new)
        return
    before = dict(table)
    table.clear()
    for key, new in items:
        for number, each in enumerate(new):
            value = before[key]
            table[each] = dict(value) if number and type(value) is dict else value
