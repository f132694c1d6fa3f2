"""Numeric probe for operations without a rule: do the results of random shards equal the shards of the result?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .tracked_value import Layout, tensors_in

if TYPE_CHECKING:
    from .op_rules import OpCall


class MixesShards(Exception):
    """Error for an operation that needs other ranks' shards, with a reason and, optionally, an unusual remedy."""


_OF_CLASSES = frozenset("cross_entropy nll_loss multi_margin_loss".split())
"""Functions with integer targets, whose length has nothing to do with the sharded dimension."""


def probe(call: OpCall, attempt: Sequence[Any], numbers: Mapping[int, torch.Tensor]) -> list[int | None]:
    """Return the dimension along which each result is sharded, None for a replicated one; empty if no probe is possible.

    ``attempt`` has the arguments for the global values, and ``numbers`` the untracked arguments by index. Raises
    ``MixesShards`` if the results of ranks on random shards are no shards of the global result.
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
    return cases[:1] if all(is_continuous(leaf) for leaf in call.leaves if isinstance(leaf, Layout)) else cases


def _arguments(
    call: OpCall,
    attempt: Sequence[Any],
    numbers: Mapping[int, torch.Tensor],
    ones: Sequence[float],
    generator: torch.Generator,
) -> list[list[Any]]:
    """Return random arguments for the global values, then those of each rank."""
    whole, parts = list(attempt), [list(call.leaves) for _ in ones]
    layouts = [leaf for leaf in call.leaves if isinstance(leaf, Layout)]
    is_safe = all(is_continuous(leaf) or leaf.dtype is torch.bool for leaf in layouts)
    for place, leaf in enumerate(call.leaves):
        if place in numbers:
            given = numbers[place].detach()
            for leaves in (whole, *parts):
                leaves[place] = given.to(given.device if is_safe else "cpu", copy=True)
        elif isinstance(leaf, Layout):
            device = leaf.device if is_safe else torch.device("cpu")  # an index out of range would break the CUDA context
            drawn = [random_like(leaf, share, generator).to(device) for share in ones]
            for part, own in zip(parts, drawn, strict=True):
                part[place] = own.clone()
            blocks = zip(*(torch.split(own, [*leaf.blocks] or own.shape[leaf.dim], leaf.dim) for own in drawn), strict=True)
            whole[place] = torch.cat([part for block in blocks for part in block], leaf.dim)
    return [whole, *parts]


def is_continuous(leaf: Layout | torch.Tensor) -> bool:
    """Return whether a tensor is floating-point or complex."""
    return leaf.dtype.is_floating_point or leaf.dtype.is_complex


def random_like(leaf: Layout, share: float, generator: torch.Generator) -> torch.Tensor:
    """Return normal values, or zeros with a fraction of ones, which are valid indices nearly everywhere."""
    if not is_continuous(leaf):
        return (torch.rand(leaf.shape, generator=generator) < share).to(leaf.dtype)
    kind = torch.complex64 if leaf.dtype.is_complex else torch.float32
    return torch.randn(leaf.shape, dtype=kind, generator=generator).to(leaf.dtype)


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
