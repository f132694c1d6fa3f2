"""Numeric probe of an optimizer: what an element's update depends on, by stepping small parameters whole and in parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from slapo_core import failure_reason, shard_spec

from ...distributed._torch_private import CollectiveCalledError, CollectiveWatch
from ..introspection.nested_optimizers import Optimizer, parameters_in
from ..introspection.parameter_tables import has_positions
from .optimizer_copies import representatives
from .probe_runs import COLUMNS, CORNERS, FLAT, ROWS, SMALL, ProbeRuns, Size, identity_cut, isolation


class UpdateDependence(NamedTuple):
    """Dependences of an optimizer's update.

    Args:
        shape: Whether it changes where a rank has rows or columns of a parameter instead of the whole.
        flat: Whether it changes where a rank has a range of the flattened parameter.
        coupled: Whether the update of one parameter depends on which others there are.
        draws: Whether a step draws random numbers of the process.
        communicates: Whether a step calls collectives.
        why_unknown: The reason why it could not be tried; it is then taken to depend on the shape.
    """

    shape: bool = False
    flat: bool = False
    coupled: bool = False
    draws: bool = False
    communicates: bool = False
    why_unknown: str = ""


_LARGE = Size({0: (), 1: (512,), 2: (192, 160), 3: (16, 16, 16), 4: (32, 16, 3, 3)}, (3, 1))
"""Optimizers treat small parameters differently: Adafactor factors, Shampoo preconditions, from some size on."""
_LONGEST, _THIN, _SQUARE = 2**15, 4, 1280
"""Limits of what stands for still larger parameters of the model: of a long side, of the other one, of two alike."""
_MOST = 2**23
"""Elements of all that are tried at once: a model may have a group for each layer."""


def probe(optimizer: Optimizer) -> UpdateDependence:
    """Probe what the updates of an optimizer depend on.

    Neither the optimizer nor its parameters nor any random state are changed: copies of it step small parameters.

    Args:
        optimizer: As it was made; it has not stepped.
    """
    kind = _kind_of_torchs_own(optimizer)
    if kind in _known:
        return _known[kind]
    with isolation():
        try:
            found = _probed(optimizer)
        except CollectiveCalledError:
            found = UpdateDependence(shape=True, flat=True, coupled=True, communicates=True)
        except Exception as err:
            found = UpdateDependence(shape=True, flat=True, coupled=has_positions(optimizer), why_unknown=failure_reason(err))
    if kind is not None:
        _known[kind] = found
    return found


_known: dict[object, UpdateDependence] = {}
"""Findings by kind of optimizer: a process may build many engines."""


def _kind_of_torchs_own(optimizer: Optimizer) -> object:
    """Return all that the finding of an optimizer of torch's own classes depends on; None for another class or a used one."""
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
    return kind, kind.step, repr((groups, sizes_of(optimizer)))


def is_step_divisible(optimizer: Optimizer) -> bool:
    """Return whether calls of ``step`` of some parameters each, put together as ``OneStep`` does, are a step of all.

    Args:
        optimizer: As it was made; it has not stepped. Nothing is changed.
    """
    with isolation():
        try:
            runs = ProbeRuns(optimizer, SMALL)
            whole = runs.run_first()
        except Exception:  # it was probed before, or shows itself in the first step
            return True
        try:
            return runs.is_same_in_turns(whole)
        except Exception:
            return False


def _probed(optimizer: Optimizer) -> UpdateDependence:
    runs = ProbeRuns(optimizer, SMALL)
    with CollectiveWatch():  # type: ignore[no-untyped-call]
        whole = runs.run_first()
    coupled = runs.draws or runs.is_coupled(whole)
    shape = runs.keeps_factors or not runs.is_same_in_parts(whole, ROWS) or not runs.is_same_in_parts(whole, COLUMNS)
    flat = shape or not runs.is_same_in_parts(whole, FLAT)
    for size in (_LARGE, *_larger(optimizer)) if not shape else ():
        large = ProbeRuns(optimizer, size, runs.is_sparse, runs.goes_ahead)
        whole = large.run(identity_cut)
        shape = large.keeps_factors or not all(large.is_same_in_parts(whole, cuts) for cuts in (ROWS, COLUMNS, CORNERS))
        flat = flat or shape or not large.is_same_in_parts(whole, FLAT)
        if shape:
            break
    return UpdateDependence(shape, flat, coupled or has_positions(optimizer), runs.draws)


def sizes_of(optimizer: Optimizer) -> list[Size]:
    """Return all sizes that tell how an optimizer steps parameters like its own."""
    return [SMALL, _LARGE, *_larger(optimizer)]


def _larger(optimizer: Optimizer) -> Iterator[Size]:
    """Sizes near those of the model, where these are larger than the largest that is always tried."""
    found: dict[int, tuple[int, ...]] = {}
    for parameter in parameters_in(optimizer):
        spec = shard_spec(parameter)
        shape = tuple(parameter.shape) if spec is None else tuple(spec.full_shape)
        if len(shape) in (1, 2):
            found[len(shape)] = tuple(map(max, found.get(len(shape), shape), shape))
    most = max(_MOST // len(representatives(optimizer, merges=True)), _THIN)
    longest, square = min(_LONGEST, most // _THIN), min(_SQUARE, math.isqrt(most))
    long = {number: tuple(min(size, longest) for size in shape) for number, shape in found.items()}
    line, (rows, columns) = long.get(1, (1,)), long.get(2, (1, 1))
    shapes = [(rows, _THIN), (_THIN, columns), (min(rows, square), min(columns, square))]
    largest = _LARGE.shapes
    if max(rows, columns) > max(largest[2]) or line > largest[1]:
        for shape in shapes:
            yield Size({**SMALL.shapes, 1: line, 2: shape}, (2,))
