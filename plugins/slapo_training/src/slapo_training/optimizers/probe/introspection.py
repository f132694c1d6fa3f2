"""Tables of a ``torch.optim.Optimizer``, read and rewritten in place.

Wrappers and composites hold nested optimizers in attributes. Parameters or their ids are in groups, in the state, and in sets,
dicts and lists of attributes. Step counters are advanced to probe steps after a warm-up, and restored between calls that form
one step.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

Optimizer = torch.optim.Optimizer

_OPAQUE = (torch.Tensor, nn.Module, dist.ProcessGroup, DeviceMesh, type, types.FunctionType, types.MethodType, types.ModuleType)
_OWN = ("state", "param_groups", "defaults")
_DEEPEST = 5


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer and its nested optimizers in attributes, containers or plain objects, each once."""
    return list(named_optimizers_in(optimizer).values())


def named_optimizers_in(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizer under ``""`` and its nested optimizers by path, e.g. ``"parts.0"``, each once."""
    found: dict[str, Optimizer] = {}
    seen: set[int] = set()

    def visit(value: Any, place: tuple[str, ...], depth: int) -> None:
        if id(value) in seen or depth > _DEEPEST or isinstance(value, _OPAQUE):
            return
        seen.add(id(value))
        if isinstance(value, Optimizer):
            found[".".join(place)] = value
            depth = 0
        for name, each in _inner_values(value):
            visit(each, (*place, name), depth + 1)

    visit(optimizer, (), 0)
    return found


def groups_in(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer and its nested optimizers, each once."""
    groups = (group for each in optimizers_in(optimizer) for group in each.param_groups)
    return list({id(group): group for group in groups}.values())


def parameters_in(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer and its nested optimizers step, each once."""
    held = (parameter for group in groups_in(optimizer) for parameter in group["params"])
    return list({id(parameter): parameter for parameter in held}.values())


def referenced_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters in groups and in list attributes of an optimizer and its nested optimizers, each once."""
    lists = (value for each in optimizers_in(optimizer) for value in vars(each).values() if isinstance(value, list))
    others = (item for value in lists for item in value if isinstance(item, nn.Parameter))
    return list({id(parameter): parameter for parameter in (*parameters_in(optimizer), *others)}.values())


def _inner_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Iterate by name over the values in a value that may hold an optimizer."""
    if isinstance(value, list | tuple):
        yield from ((str(number), each) for number, each in enumerate(value))
    elif isinstance(value, dict):
        yield from ((str(key) if isinstance(key, str | int) else "?", each) for key, each in value.items())
    elif hasattr(value, "__dict__"):
        own = _OWN if isinstance(value, Optimizer) else ()
        yield from ((name, each) for name, each in vars(value).items() if name not in own)


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
