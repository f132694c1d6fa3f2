"""Numeric probe of the dependences of an optimizer's update, by steps of small parameters whole and in parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from slapo_core import failure_reason, shard_spec

from ...distributed._torch_private import CollectiveCalledError, CollectiveWatch
from .introspection import Optimizer, has_positions, parameters_in
from .optimizer_copies import representatives
from .probe_runs import COLUMNS, CORNERS, FLAT, ROWS, SMALL, ProbeRuns, Size, identity_cut, isolate
from .step_operators import is_pointwise

_Result = TypeVar("_Result")


class UpdateDependence(NamedTuple):
    """Dependences of an optimizer's update.

    Args:
        shape: True if rows or columns of a parameter are updated differently than the whole.
        flat: True if a range of the flattened parameter is updated differently than the whole.
        coupled: True if the update of one parameter depends on the other parameters.
        draws: True if a step uses the process's random numbers.
        communicates: True if a step calls collectives.
        why_unknown: The reason why the probe failed; the update is then assumed to depend on the shape.
    """

    shape: bool = False
    flat: bool = False
    coupled: bool = False
    draws: bool = False
    communicates: bool = False
    why_unknown: str = ""


_LARGE = Size({0: (), 1: (512,), 2: (192, 160), 3: (16, 16, 16), 4: (32, 16, 3, 3)}, (3, 1))
"""Size from which optimizers treat parameters differently, e.g. Adafactor factors and Shampoo preconditions."""
_LONGEST, _THIN, _SQUARE = 2**15, 4, 1280
"""Limits of probed shapes for larger parameters: of one long side, of its other side, and of both sides of a square."""
_MAX_NUMEL = 2**23
"""Limit of the elements of all parameters of a probe; a model may have one group per layer."""


def probe(optimizer: Optimizer) -> UpdateDependence:
    """Return the dependences of the updates of a new optimizer that has not stepped.

    Copies of the optimizer step small parameters; the optimizer, its parameters and the random state do not change.
    """
    kind = _kind_of_torchs_own(optimizer)
    with isolate():
        try:
            return _probe(optimizer, kind)
        except CollectiveCalledError:
            return UpdateDependence(shape=True, flat=True, coupled=True, communicates=True)
        except Exception as err:
            return UpdateDependence(shape=True, flat=True, coupled=has_positions(optimizer), why_unknown=failure_reason(err))


_known: dict[object, Any] = {}
"""Cached results by kind of optimizer and size; a process may build many engines."""


def _once(kind: object, size: Size, run: Callable[[], _Result]) -> _Result:
    """Return the result of a run, which is cached unless there is no kind."""
    if kind is None:
        return run()
    key = kind, repr(size)
    if key not in _known:
        _known[key] = run()
    found: _Result = _known[key]
    return found


def _kind_of_torchs_own(optimizer: Optimizer) -> object:
    """Return the facts that decide the probe of an optimizer of torch; None for other classes and used optimizers."""
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind or optimizer.state:
        return None
    chosen = {id(each): (each.dim(), each.dtype, each.device) for each in representatives(optimizer, merges=False)}
    if not chosen:
        return None
    groups = [
        (
            [(name, repr(value)) for name, value in sorted(group.items()) if name not in ("params", "param_names")],
            [chosen[id(each)] for each in group["params"] if id(each) in chosen],
        )
        for group in optimizer.param_groups
    ]
    return kind, kind.step, repr(groups)


def is_step_divisible(optimizer: Optimizer) -> bool:
    """Return True if several calls of ``step`` for some parameters each, as in ``OneStep``, equal one step of all.

    The optimizer is new; it does not change.
    """
    with isolate():
        try:
            runs = ProbeRuns(optimizer, SMALL)
            whole = runs.run_first()
        except Exception:  # an earlier probe, or the first step, reports the error
            return True
        try:
            return runs.is_same_in_several_calls(whole)
        except Exception:
            return False


class _SmallProbe(NamedTuple):
    dependence: UpdateDependence
    is_sparse: bool
    goes_ahead: bool


def _probe(optimizer: Optimizer, kind: object) -> UpdateDependence:
    small = _once(kind, SMALL, lambda: _probe_small(optimizer))
    found = small.dependence
    for size in (_LARGE, *_model_sizes(optimizer)):
        if found.shape:
            break
        shape, flat = _once(kind, size, partial(_probe_large, optimizer, size, small))
        found = found._replace(shape=shape, flat=found.flat or flat)
    return found


def _probe_small(optimizer: Optimizer) -> _SmallProbe:
    runs = ProbeRuns(optimizer, SMALL)
    with CollectiveWatch():  # type: ignore[no-untyped-call]
        whole = runs.run_first()
    coupled = runs.draws or runs.depends_on_other_parameters(whole)
    shape = runs.keeps_factors or not runs.is_same_in_parts(whole, ROWS) or not runs.is_same_in_parts(whole, COLUMNS)
    flat = shape or not runs.is_same_in_parts(whole, FLAT)
    found = UpdateDependence(shape, flat, coupled or has_positions(optimizer), runs.draws)
    return _SmallProbe(found, runs.is_sparse, runs.goes_ahead)


def _probe_large(optimizer: Optimizer, size: Size, small: _SmallProbe) -> tuple[bool, bool]:
    """Return the dependences on shape and on flattening of parameters of some size."""
    large = ProbeRuns(optimizer, size, small.is_sparse, small.goes_ahead)
    other = ProbeRuns(optimizer, Size(SMALL.shapes, size.steps), small.is_sparse, small.goes_ahead)
    if is_pointwise(operators := large.operators()) and operators == other.operators():
        return False, False  # each element is updated as in the small parameters, whose parts were stepped
    whole = large.run(identity_cut)
    shape = large.keeps_factors or not all(large.is_same_in_parts(whole, cuts) for cuts in (ROWS, COLUMNS, CORNERS))
    return shape, shape or (not small.dependence.flat and not large.is_same_in_parts(whole, FLAT))


def sizes_of(optimizer: Optimizer) -> list[Size]:
    """Return all sizes to probe for an optimizer's own parameters."""
    return [SMALL, _LARGE, *_model_sizes(optimizer)]


def _model_sizes(optimizer: Optimizer) -> Iterator[Size]:
    """Iterate over sizes near those of the model's parameters, if these are larger than ``_LARGE``."""
    found: dict[int, tuple[int, ...]] = {}
    for parameter in parameters_in(optimizer):
        spec = shard_spec(parameter)
        shape = tuple(parameter.shape) if spec is None else tuple(spec.full_shape)
        if len(shape) in (1, 2):
            found[len(shape)] = tuple(map(max, found.get(len(shape), shape), shape))
    most = max(_MAX_NUMEL // len(representatives(optimizer, merges=True)), _THIN)
    longest, square = min(_LONGEST, most // _THIN), min(_SQUARE, math.isqrt(most))
    long = {number: tuple(min(size, longest) for size in shape) for number, shape in found.items()}
    line, (rows, columns) = long.get(1, (1,)), long.get(2, (1, 1))
    shapes = [(rows, _THIN), (_THIN, columns), (min(rows, square), min(columns, square))]
    largest = _LARGE.shapes
    if max(rows, columns) > max(largest[2]) or line > largest[1]:
        for shape in shapes:
            yield Size({**SMALL.shapes, 1: line, 2: shape}, (2,))
