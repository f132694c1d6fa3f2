"""Numeric probe for operations without a rule: do the results of random shards equal the shards of the result?

``probe_partial`` asks this of partial values before the reduction. A row-parallel layer without its own sync returns one, and a
module around it reduces its output. A function in between must be linear in the partial value: scaling and reshaping are, a
``relu`` or a norm is not. A replicated bias or residual would be added once for each rank. Torch's rules would reduce at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slapo_core import rng_state

from ...planning.dry_run.function_probe import is_continuous, random_tensor
from .tracked_value import SAME, Layout, OpCall, Outcome, partial_value, tensors_in


class MixesShards(Exception):
    """Error for an operation that needs other ranks' shards, with a reason and, optionally, an unusual remedy."""


_OF_CLASSES = frozenset("cross_entropy nll_loss multi_margin_loss".split())
"""Functions with integer targets, whose length has nothing to do with the sharded dimension."""


def probe(call: OpCall, attempt: Sequence[Any], numbers: Mapping[int, torch.Tensor]) -> list[int | None]:
    """Return the dimension along which each result is sharded, None for a replicated one; empty if no probe is possible.

    ``attempt`` has the arguments for the global values, and ``numbers`` the untracked arguments by index. Raises
    ``MixesShards`` if the results of ranks on random shards are not shards of the global result.
    """
    of, generator = call.of, torch.Generator().manual_seed(0)
    free = [given for given in numbers.values() if not isinstance(given, nn.Parameter)]
    others = [given for given in free if given.is_floating_point() or call.name not in _OF_CLASSES]
    if any(of.shape[of.dim] in given.shape for given in others):  # its length may depend on this rank's shard
        return []
    cases = []
    for ones in _shares_of_ones(call):
        results = _results(call, _arguments(call, attempt, numbers, ones, generator))
        if len({len(found) for found in results}) != 1:  # such as heads one by one
            return []
        cases.append([(_by_rank(expected, of), found) for expected, *found in zip(*results, strict=True)])
    dims = [_dim_of(draws) for draws in zip(*cases, strict=True)]
    return [] if of.blocks and of.whole[0] in [value.shape for value in results[0]] else dims  # its blocks are still fused


def _shares_of_ones(call: OpCall) -> list[list[float]]:
    """Return for each case the fraction of ones in each rank's shard of booleans and integers.

    Fractions of 0 and 1 distinguish a local ``any``, ``all`` or first one from the global result.
    """
    ranks = range(call.of.ranks)
    cases = [[0.5 for _ in ranks], [float(rank == 0) for rank in ranks], [float(rank == ranks[-1]) for rank in ranks]]
    return cases[:1] if all(is_continuous(leaf.dtype) for leaf in call.leaves if isinstance(leaf, Layout)) else cases


def _arguments(
    call: OpCall, attempt: Sequence[Any], numbers: Mapping[int, torch.Tensor], ones: Sequence[float], generator: torch.Generator
) -> list[list[Any]]:
    """Return random arguments for the global values, then those of each rank."""
    whole, parts = list(attempt), [list(call.leaves) for _ in ones]
    layouts = [leaf for leaf in call.leaves if isinstance(leaf, Layout)]
    is_safe = all(is_continuous(leaf.dtype) or leaf.dtype is torch.bool for leaf in layouts)
    for place, leaf in enumerate(call.leaves):
        if place in numbers:
            given = numbers[place].detach()
            for leaves in (whole, *parts):
                leaves[place] = given.to(given.device if is_safe else "cpu", copy=True)
        elif isinstance(leaf, Layout):
            device = leaf.device if is_safe else torch.device("cpu")  # an index out of range would break the CUDA context
            drawn = [random_tensor(leaf.shape, leaf.dtype, generator, share).to(device) for share in ones]
            for part, own in zip(parts, drawn, strict=True):
                part[place] = own.clone()
            blocks = zip(*(torch.split(own, [*leaf.blocks] or own.shape[leaf.dim], leaf.dim) for own in drawn), strict=True)
            whole[place] = torch.cat([part for block in blocks for part in block], leaf.dim)
    return [whole, *parts]


def _results(call: OpCall, arguments: list[list[Any]]) -> list[list[torch.Tensor]]:
    """Return the result tensors of each call; empty if one fails or draws random numbers."""
    layouts = [leaf for leaf in call.leaves if isinstance(leaf, Layout)]
    try:
        devices = {leaf.device for leaf in layouts if leaf.device.type == "cuda"}
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            before = generator_states(devices)
            results = [list(tensors_in(call.run(leaves))) for leaves in arguments]
            return results if all(map(torch.equal, before, generator_states(devices))) else []
    except Exception:  # a local size may not fit, and operators may raise anything
        return []


def generator_states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    """Return the states of the generators of the CPU and of these devices."""
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _by_rank(whole: torch.Tensor, of: Layout) -> torch.Tensor:
    """Return a fused value of the layout ``of`` with the blocks of each rank side by side; any other value unchanged."""
    if not of.blocks or whole.shape != of.whole[0]:
        return whole
    blocks = [block.chunk(of.ranks, of.dim) for block in torch.split(whole, [size * of.ranks for size in of.blocks], of.dim)]
    return torch.cat([part for rank in zip(*blocks, strict=True) for part in rank], of.dim)


def _dim_of(draws: Sequence[tuple[torch.Tensor, list[torch.Tensor]]]) -> int | None:
    """Return the dimension along which the results are shards in every case; None if each is the global result."""
    if all(_same(expected, part) for expected, found in draws for part in found):
        return None
    for dim in range(min(expected.dim() for expected, _ in draws)):
        chunks = [(expected.chunk(len(found), dim), found) for expected, found in draws]
        if all(len(parts) == len(found) and all(map(_same, parts, found)) for parts, found in chunks):
            return dim
    raise MixesShards


def _same(whole: torch.Tensor, part: torch.Tensor) -> bool:
    kind = torch.complex128  # represents all other dtypes
    near = max(1e-4, 8 * torch.finfo(whole.dtype).eps if whole.is_floating_point() else 0)
    return whole.shape == part.shape and torch.allclose(whole.to(kind), part.to(kind), rtol=near, atol=near, equal_nan=True)


_DRAWS = 3  # a single element may have the sign that relu keeps
REDUCE = "give sync('fwd_post', 'all_reduce') to that layer itself"
"""Remedy for a partial value that must be reduced earlier."""


def probe_partial(call: OpCall, numbers: Mapping[int, torch.Tensor]) -> Sequence[Outcome]:
    """Return the layout of each result of a torch function of partial values, or ``SAME`` for a replicated one.

    The result is empty if no probe is possible. ``numbers`` are the untracked arguments by index. Raises ``MixesShards`` if the
    results of the partial values do not add up to the result of the sum.
    """
    layouts = [leaf for leaf in call.leaves if isinstance(leaf, Layout) and leaf.placement is not None]
    if "c10d" in str(call.func):  # the model's own collective may be the reduction
        return ()
    if not all(layout.placement.is_partial() and is_continuous(layout.dtype) for layout in layouts):  # type: ignore[union-attr]
        return ()
    generator, cases = torch.Generator().manual_seed(0), []
    for _ in range(_DRAWS):
        results = _results_of_sums(call, _summands(call, numbers, generator))
        if len({len(found) for found in results}) != 1:
            return ()
        cases.append([(whole, parts) for whole, *parts in zip(*results, strict=True)])
    found: list[Outcome] = []
    for draws in zip(*cases, strict=True):
        if all(_is_near(whole, part) for whole, parts in draws for part in parts):
            found.append(SAME)
        elif all(is_continuous(whole.dtype) and _is_near(whole, sum(parts)) for whole, parts in draws):
            found.append(partial_value(draws[0][0], call.of.ranks))
        else:
            why = f"{call.name} is not linear: the sum of its results for the parts is not its result for the sum"
            raise MixesShards(why, REDUCE)
    return found


def _summands(call: OpCall, numbers: Mapping[int, torch.Tensor], generator: torch.Generator) -> list[list[Any]]:
    """Return random arguments of the sum, then of each rank; weights are random too, because they may still be zero."""
    everyone = [list(call.leaves) for _ in range(1 + call.of.ranks)]

    def draw(leaf: Any) -> torch.Tensor:
        return _in_float32(random_tensor(leaf.shape, leaf.dtype, generator))

    for place, leaf in enumerate(call.leaves):
        if place in numbers:
            own = _in_float32(numbers[place].detach())
            drawn = draw(leaf).to(own.device) if numbers[place].requires_grad else own
            given = [drawn.clone() for _ in everyone]
        elif isinstance(leaf, Layout):
            parts = [draw(leaf).to(leaf.device) for _ in everyone[1:]]
            given = [torch.stack(parts).sum(0), *parts]
        else:
            continue
        for leaves, tensor in zip(everyone, given, strict=True):
            leaves[place] = tensor
    return everyone


def _results_of_sums(call: OpCall, arguments: list[list[Any]]) -> list[list[torch.Tensor]]:
    """Return the results of each call, with equal random draws; empty if one fails. Inside ``fork_rng``, a draw is an error."""
    devices = {call.of.device} if call.of.device.type == "cuda" else set()
    results, drawn = [], False
    try:
        for leaves in arguments:
            with torch.random.fork_rng(devices=devices):
                before = generator_states(devices)
                results.append(list(tensors_in(call.run(leaves))))
                drawn = not all(map(torch.equal, before, generator_states(devices)))
    except Exception:  # a local size may not fit, and operators may raise anything
        return []
    if drawn and rng_state().forks:
        raise MixesShards(f"{call.name} draws different random numbers on each rank for a partial value", REDUCE)
    return results


def _in_float32(x: torch.Tensor) -> torch.Tensor:
    """Return a lower-precision tensor in float32, so that small values are not lost in rounding."""
    return x.float() if x.is_floating_point() and x.element_size() < 4 else x


def _is_near(whole: torch.Tensor, other: Any) -> bool:
    """Return whether two results are equal up to rounding of the largest values that were added."""
    if whole.shape != other.shape or not is_continuous(whole.dtype):
        return whole.shape == other.shape and torch.equal(whole, other)
    scale = max(1.0, float(whole.abs().nan_to_num(0, 0, 0).max())) if whole.numel() else 1.0
    near = scale * max(1e-4, 8 * torch.finfo(whole.dtype).eps)
    return torch.allclose(whole.to(torch.complex128), other.to(torch.complex128), rtol=0, atol=near, equal_nan=True)
