"""Constraints of a plan: the values that they allow, and which of them contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from slapo_core import SlapoError, UnknownNameError
from slapo_report import format_count

from .layouts import ContradictionError, Layout, LayoutSpace

CONSTRAINTS = Layout._fields
"""Names of constraints, each with a value or a list of values."""

_NUMBERS = ("tp", "pp", "dp", "rows", "microbatches")
_NAMES = ("data_parallel", "pipeline_schedule")
_SHOWN = 3
"""Values that a sentence lists for one constraint."""


def check_constraints(constraints: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the allowed values by name; a constraint that is None allows all.

    Raises:
        UnknownNameError: no such constraint.
        SlapoError: the constraints are no mapping, or a value is of a wrong kind.
    """
    if not isinstance(constraints, Mapping):
        raise SlapoError(f"plan: constraints is {constraints!r}; give a dict, such as {{'tp': [1, 2]}}")
    found = {}
    for name, value in constraints.items():
        if name not in CONSTRAINTS:
            raise UnknownNameError.of("constraint", str(name), CONSTRAINTS)
        if value is not None:
            found[name] = _allowed_values(name, value)
    return found


def _allowed_values(name: str, value: Any) -> tuple[Any, ...]:
    values = tuple(value) if isinstance(value, (list, tuple, range, set, frozenset)) else (value,)
    if name in _NUMBERS:
        kind, is_right = "a whole number from 1 on", all(_is_number(each) and each > 0 for each in values)
        values = tuple(map(int, values)) if is_right else values
    elif name in _NAMES:
        kind, is_right = "a name", all(isinstance(each, str) for each in values)
    else:
        kind, is_right = "True or False", all(isinstance(each, bool) for each in values)
    if not values or not is_right:
        raise SlapoError(f"plan: constraint {name} is {value!r}; give {kind}, or a list of such values")
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def contradiction(space: LayoutSpace) -> str:
    """Return a sentence on constraints that leave no layout: which could have another value, and the nearest ones."""
    given = ", ".join(f"{name}={_as_list(values)}" for name, values in space.constraints.items())
    ranks = format_count(space.ranks, "rank")
    problem = f"plan: no layout of {ranks} and a global batch of {format_count(space.global_batch, 'row')} has {given}"
    remedies = [f"{name}={_as_list(values)}" for name in space.constraints if (values := _possible_values(space, name))]
    if remedies:
        return f"{problem}; with {', or with '.join(remedies)} there is one"
    return f"{problem}; leave two or more of these out"


def _possible_values(space: LayoutSpace, name: str) -> list[Any]:
    """Return the values of a constraint that the others admit, those nearest to its own first."""
    free = space.without(name)
    try:
        values = {getattr(layout, name) for tp in free.degrees() for layout in free.layouts(tp)}
    except ContradictionError:
        return []
    own = space.constraints[name][0]
    return sorted(values, key=lambda each: abs(each - own) if _is_number(each) else 0)[:_SHOWN]


def _as_list(values: Any) -> str:
    return " or ".join(map(str, values))
