"""Values of parameters by original name, compared shard by shard, and gathered only if they differ.

A parameter that a step made from several of the unmodified model, as a fused projection, has its values under their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from slapo_core import parameter_facts, shard_spec
from slapo_training.distributed import over_group, plain

from ..ranks.failure_propagation import Ranks
from .equivalence import Difference, Tolerance, difference

Named = Mapping[str, torch.Tensor | None]
ReadValue = Callable[[torch.Tensor], torch.Tensor | None]
EXACT = Tolerance(0.0, 0.0)


class ExpectedValues(NamedTuple):
    """Values to compare with.

    Args:
        values: Full values, by original name.
        tolerance: Allowed difference.
        ranks: The ranks that compare.
    """

    values: Named
    tolerance: Tolerance
    ranks: Ranks


class Values(NamedTuple):
    """A value of each parameter of a model.

    Args:
        whole: Full values by original name; for a value that is close on all ranks the expected tensor itself.
        near: Parameters whose value is close on all ranks.
        largest: The largest error of those on this rank.
    """

    whole: dict[str, torch.Tensor | None]
    near: dict[nn.Parameter, torch.Tensor | None]
    largest: Difference | None


def values_of(model: nn.Module, what: str, read: ReadValue, expected: ExpectedValues | None) -> Values:
    """Read all parameters: a tied one under each of its names, a fused one under those of its parts. Collective."""
    named: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named.setdefault(parameter, []).append(name)
    names = {parameter: parameter_facts(parameter).names or tuple(own) for parameter, own in named.items()}
    held = {parameter: plain(read(parameter)) for parameter in named}
    near, largest = _compare_local_values(what, held, names, expected) if expected is not None else ({}, None)
    found: dict[str, torch.Tensor | None] = {}
    fused: dict[nn.Parameter, torch.Tensor | None] = {}
    for parameter, own in names.items():
        if parameter in near:
            value = near[parameter]
            found.update({name: value for name in own if name not in found})
        else:  # of two parameters of one name the one that is far off
            value = over_group(parameter, lambda _, local=held[parameter]: local)  # type: ignore[misc]
            if is_fused(parameter):
                fused[parameter] = value
            else:
                found.update(dict.fromkeys(own, value))
    return Values({**split_fused(fused), **found}, near, largest)


def local_part(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a full tensor, according to the parameter's shard specification."""
    spec = shard_spec(parameter)
    return spec.local(whole) if spec is not None and spec.num_shards > 1 else whole


def _compare_local_values(
    what: str,
    held: Mapping[nn.Parameter, torch.Tensor | None],
    names: Mapping[nn.Parameter, tuple[str, ...]],
    expected: ExpectedValues,
) -> tuple[dict[nn.Parameter, torch.Tensor | None], Difference | None]:
    largest, near = None, set[int]()
    for number, (parameter, local) in enumerate(held.items()):
        known = [expected.values.get(name) for name in names[parameter]]
        if any(name not in expected.values for name in names[parameter]):
            continue
        label = f"{what} of {names[parameter][0]!r}"
        unique = {id(value): value for value in known}.values()
        error = max((_error(label, one, parameter, local, expected.tolerance) for one in unique), default=math.inf)
        if error < math.inf:
            near.add(number)
        if 0 < error < math.inf and (largest is None or error > (largest.absolute or 0.0)):
            assert known[0] is not None
            largest = next(difference(label, local_part(known[0], parameter), local, EXACT), None)
    agreed = set.intersection(*expected.ranks.gather(near))
    every = list(held)
    return {every[number]: expected.values[names[every[number]][0]] for number in sorted(agreed)}, largest


def _error(
    what: str, whole: torch.Tensor | None, parameter: torch.Tensor, local: torch.Tensor | None, tolerance: Tolerance
) -> float:
    """Return the largest error; infinity if it exceeds the tolerance for all numbers, so that details are compared."""
    if whole is None or local is None:
        return 0.0 if whole is local else math.inf
    spec = shard_spec(parameter)
    if spec is not None and spec.num_shards > 1 and spec.full_shape != tuple(whole.shape):
        return math.inf
    one = local_part(whole, parameter)
    if one.shape != local.shape or one.dtype is not local.dtype or one.device != local.device:
        return math.inf
    if tolerance is EXACT or not one.is_floating_point() or not one.numel():
        return 0.0 if torch.equal(one, local) else math.inf
    error = float(torch.linalg.vector_norm(one - local, math.inf))
    return error if error <= 0.99 * tolerance.absolute(whole, what) else math.inf  # NaN is not


_ATTRIBUTE = "slapo_made_of"
"""Attribute set by ``slapo_weights.made_of``: the dimension, and the name, range and full size of each part along it."""


class _Piece(NamedTuple):
    """A range of one of the unmodified model's parameters.

    Args:
        dim: Dimension of the range.
        start: Its start.
        stop: Its end.
        size: Size of the full parameter along the dimension.
        value: The values of the range.
    """

    dim: int
    start: int
    stop: int
    size: int
    value: torch.Tensor | None


def is_fused(parameter: torch.Tensor) -> bool:
    """Return True if a parameter records its parts."""
    return not parameter_facts(parameter).names and getattr(parameter, _ATTRIBUTE, None) is not None


def added_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names of trainable parameters that a step created without recording their parts."""
    named = model.named_parameters(remove_duplicate=False)
    unnamed = (name for name, each in named if not (parameter_facts(each).names or is_fused(each)) and each.requires_grad)
    return frozenset(unnamed)


def split_fused(values: Mapping[nn.Parameter, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Return the values of fused parameters, None if missing, under the unmodified model's names, where all parts are there."""
    pieces: dict[str, list[_Piece]] = {}
    for parameter, value in values.items():
        for name, piece in _pieces(parameter, value):
            pieces.setdefault(name, []).append(piece)
    in_order = {name: sorted(found, key=lambda piece: piece.start) for name, found in pieces.items()}
    return {name: _join_pieces(found) for name, found in in_order.items() if _is_whole(found)}


def _pieces(parameter: nn.Parameter, value: torch.Tensor | None) -> Iterator[tuple[str, _Piece]]:
    dim, parts, *_ = getattr(parameter, _ATTRIBUTE)
    at = 0
    for name, (start, stop), size in parts:
        here = value.narrow(dim, at, stop - start) if value is not None else None
        yield name, _Piece(dim, start, stop, size, here)
        at += stop - start


def _is_whole(pieces: Iterable[_Piece]) -> bool:
    at, size = 0, 0
    for piece in pieces:
        if piece.start != at:
            return False
        at, size = piece.stop, piece.size
    return at == size


def _join_pieces(pieces: list[_Piece]) -> torch.Tensor | None:
    known = [piece.value for piece in pieces if piece.value is not None]
    return torch.cat(known, pieces[0].dim) if len(known) == len(pieces) else None
