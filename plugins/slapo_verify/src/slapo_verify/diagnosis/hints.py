"""Hints at known causes of differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import is_sharded, parameter_facts

from ..comparison.equivalence import Tolerance

Tensor = torch.Tensor

OF_UPDATES = (
    "the gradients are right; the optimizer makes the update of an element depend on others, which other ranks have: "
    "an engine of build steps whole tensors, which verify_engine shows"
)


def hint_of(
    expected: Tensor, actual: Tensor, reference: nn.Module, tolerance: Tolerance, group: Any, backward: bool
) -> str | None:
    """Return a hint at the cause of a wrong tensor, or None. Collective over ``group``, that of the shards.

    Both floating-point tensors have the same shape on every rank. ``backward`` is True for gradients.
    """
    ranks = dist.get_world_size(group) if group is not None else 1
    summed = actual.clone()
    if ranks > 1:
        dist.all_reduce(summed, group=group)
    near = _closeness_test(expected, tolerance)
    if ranks > 1 and near(summed):
        if backward:
            return f"the {ranks} ranks have parts of the gradient that sum to the right one: a sync of gradients is missing"
        return f"the {ranks} ranks have parts that sum to the right values: an all-reduce is missing"
    if ranks > 1 and not _is_same_everywhere(actual, near, expected, group):
        what = "gradients of it, which is whole: a sync of gradients" if backward else "values: an all-reduce or a gather"
        return f"the ranks have different {what} is missing between it and the {'loss' if backward else 'inputs'}"
    return next(local_hints(expected, actual, reference, tolerance, ranks), None)


def local_hints(expected: Tensor, actual: Tensor, reference: nn.Module, tolerance: Tolerance, ranks: int = 1) -> Iterator[str]:
    """Yield hints at the cause of a wrong tensor, without communication."""
    near = _closeness_test(expected, tolerance)
    factor = _factor(expected, actual)
    if factor is not None and abs(factor - 1) > 0.05 and abs(factor) > 1e-3 and near(actual / factor):
        is_num_ranks = ranks > 1 and abs(factor - ranks) < 1e-2
        because = ", as many as there are ranks: summed twice, or a mean is a sum" if is_num_ranks else ""
        yield f"every number is {factor:.4g} times what it should be{because}"
    for name, parameter in reference.named_parameters():
        if parameter.dim() == 1 and expected.dim() and expected.shape[-1] == parameter.shape[0] and bool(parameter.any()):
            excess = _extra_bias_count(actual - expected, parameter.detach())
            if excess is not None and near(actual - excess * parameter.detach()):
                yield f"{name!r} is in it {excess + 1} times: a bias is added by every rank"
    if expected.dim() and _are_permuted(expected, actual, near):
        yield "these are the right numbers in another order: fused blocks, q, k and v say, are cut or put together wrongly"


def _is_same_everywhere(actual: Tensor, near: Callable[[Tensor], bool], expected: Tensor, group: Any) -> bool:
    mean = actual.clone()
    dist.all_reduce(mean, group=group)
    mean /= dist.get_world_size(group)
    apart = torch.tensor(not near(expected + (actual - mean)), device=actual.device, dtype=torch.uint8)
    dist.all_reduce(apart, dist.ReduceOp.MAX, group=group)
    return not bool(apart)


def broken_ties(reference: nn.Module, scheduled: nn.Module) -> str | None:
    """Return a sentence on names that are one parameter in the unmodified model and several in the scheduled one, or None."""
    now: dict[str, int] = {}
    for name, parameter in scheduled.named_parameters(remove_duplicate=False):
        now.update(dict.fromkeys(parameter_facts(parameter).names or (name,), id(parameter)))
    together: dict[int, list[str]] = {}
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        together.setdefault(id(parameter), []).append(name)
    for names in together.values():
        held = {now[name] for name in names if name in now}
        if len(held) > 1:
            return f"{' and '.join(map(repr, names))} are one parameter, and have become {len(held)}: the tie is broken"
    return None


def is_split(scheduled: nn.Module) -> bool:
    """Return True if this rank has a part of some parameter."""
    return any(map(is_sharded, scheduled.parameters()))


def frozen_parameter(reference: nn.Module, scheduled: nn.Module) -> str | None:
    """Return a sentence on a parameter that is trained in only one model, or None."""
    named = reference.named_parameters(remove_duplicate=False)
    trained: Mapping[str, bool] = {name: parameter.requires_grad for name, parameter in named}
    for name, parameter in scheduled.named_parameters(remove_duplicate=False):
        for original in parameter_facts(parameter).names or (name,):
            if trained.get(original, parameter.requires_grad) != parameter.requires_grad:
                return f"{original!r} is {'trained' if parameter.requires_grad else 'frozen'} since, and was not before"
    return None


def _closeness_test(expected: Tensor, tolerance: Tolerance) -> Callable[[Tensor], bool]:
    return lambda other: bool(tolerance.accepts(expected, other).all())


def _factor(expected: Tensor, actual: Tensor) -> float | None:
    """Return the least-squares factor between the numbers, or None."""
    square = float(expected.double().square().sum())
    return float((expected.double() * actual.double()).sum()) / square if square else None


def _extra_bias_count(difference: Tensor, bias: Tensor) -> int | None:
    """Return how many times too often a bias was added, a whole number, or None."""
    square = float(bias.double().square().sum())
    times = float((difference.double() * bias.double()).sum()) / square / max(difference[..., 0].numel(), 1)
    return round(times) if round(times) >= 1 and abs(times - round(times)) < 0.05 else None


def _are_permuted(expected: Tensor, actual: Tensor, near: Callable[[Tensor], bool]) -> bool:
    """Return True if slices along one dimension are the expected ones in another order."""
    if float((actual - expected).double().square().sum()) < 0.1 * float(expected.double().square().sum()):
        return False
    for dim in range(expected.dim()):
        one, other = (each.transpose(0, dim).flatten(1) if each.dim() > 1 else each.unsqueeze(1) for each in (expected, actual))
        keys = [each.double().sum(1).sort() for each in (one, other)]
        if torch.equal(keys[0].indices, keys[1].indices):
            continue
        moved = torch.empty_like(other)
        moved[keys[0].indices] = other[keys[1].indices]
        shape = expected.transpose(0, dim).shape
        if near(moved.view(shape).transpose(0, dim)):
            return True
    return False
