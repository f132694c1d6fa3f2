"""Values of parameters by original name, compared shard by shard, and gathered only if they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from slapo_core import parameter_facts, shard_spec
from slapo_training.distributed import over_group, plain

from ..model_setup.fused_parameters import is_fused, split_fused
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
