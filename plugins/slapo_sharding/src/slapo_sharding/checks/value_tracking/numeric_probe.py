"""Random numbers decide what torch's rules do not know: do ranks, each with its part, compute the parts of the result?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .tracked_value import Layout, tensors_in

if TYPE_CHECKING:
    from .op_rules import OpCall


class MixesShards(Exception):
    """An operation needs the parts of other ranks, or may; the reason and, if there is a better one than usual, the remedy."""


_OF_CLASSES = frozenset("cross_entropy nll_loss multi_margin_loss".split())
"""Functions that are given whole numbers that count along another dimension than this, as many as there happen to be."""


def probe(question: OpCall, attempt: Sequence[Any], numbers: Mapping[int, torch.Tensor]) -> list[int | None]:
    """What ranks compute part by part, of random numbers.

    Args:
        question: The call of one rank.
        attempt: Arguments for all ranks' values together.
        numbers: Place to tensor, of the arguments that are not followed.

    Returns:
        The dimension along which each result is sharded, None for one that is the same on every rank; empty where it cannot be
        tried.

    Raises:
        Mixed: what ranks compute are no parts of the whole result.
    """
    of, generator = question.of, torch.Generator().manual_seed(0)
    free = [given for given in numbers.values() if not isinstance(given, nn.Parameter)]
    others = [given for given in free if given.is_floating_point() or question.name not in _OF_CLASSES]
    if any(of.shape[of.dim] in given.shape for given in others):  # it may have been made as long as this rank's part
        return []
    cases = []
    for ones in _shares_of_ones(question):
        results = _results(question, _arguments(question, attempt, numbers, ones, generator))
        if len({len(found) for found in results}) != 1:  # heads one by one, say
            return []
        cases.append([(_by_rank(expected, of), found) for expected, *found in zip(*results, strict=True)])
    dims = [_dim_of(draws) for draws in zip(*cases, strict=True)]
    return [] if of.blocks and of.whole[0] in [value.shape for value in results[0]] else dims  # it is fused still


def _shares_of_ones(question: OpCall) -> list[list[float]]:
    """For each draw the share of ones in each rank's part, of truth values and whole numbers.

    None or nothing else on one rank tells ``any``, ``all`` and the first one of a part from those of the whole.
    """
    ranks = range(question.of.ranks)
    anyhow, first, last = (
        [0.5 for _ in ranks],
        [float(rank == 0) for rank in ranks],
        [float(rank == ranks[-1]) for rank in ranks],
    )
    layouts = [leaf for leaf in question.leaves if isinstance(leaf, Layout)]
    return [anyhow] if all(map(is_continuous, layouts)) else [anyhow, first, last]


def _arguments(
    question: OpCall,
    attempt: Sequence[Any],
    numbers: Mapping[int, torch.Tensor],
    ones: Sequence[float],
    generator: torch.Generator,
) -> list[list[Any]]:
    """Those for all ranks' values together, then those of each rank."""
    whole, parts = list(attempt), [list(question.leaves) for _ in ones]
    layouts = [leaf for leaf in question.leaves if isinstance(leaf, Layout)]
    is_safe = all(is_continuous(leaf) or leaf.dtype is torch.bool for leaf in layouts)
    for place, leaf in enumerate(question.leaves):
        if place in numbers:
            given = numbers[place].detach()
            for leaves in (whole, *parts):
                leaves[place] = given.to(given.device if is_safe else "cpu", copy=True)
        elif isinstance(leaf, Layout):
            device = leaf.device if is_safe else torch.device("cpu")  # an index out of range would be the end of CUDA
            drawn = [random_like(leaf, share, generator).to(device) for share in ones]
            for part, own in zip(parts, drawn, strict=True):
                part[place] = own.clone()
            blocks = zip(*(torch.split(own, [*leaf.blocks] or own.shape[leaf.dim], leaf.dim) for own in drawn), strict=True)
            whole[place] = torch.cat([part for block in blocks for part in block], leaf.dim)
    return [whole, *parts]


def is_continuous(leaf: Layout | torch.Tensor) -> bool:
    """Whether its numbers are no counts and no truth values."""
    return leaf.dtype.is_floating_point or leaf.dtype.is_complex


def random_like(leaf: Layout, share: float, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers, or zeros and a share of ones: these are in range as an index of nearly all there is."""
    if not is_continuous(leaf):
        return (torch.rand(leaf.shape, generator=generator) < share).to(leaf.dtype)
    kind = torch.complex64 if leaf.dtype.is_complex else torch.float32
    return torch.randn(leaf.shape, dtype=kind, generator=generator).to(leaf.dtype)


def _results(question: OpCall, arguments: list[list[Any]]) -> list[list[torch.Tensor]]:
    """The tensors that each call returns; empty where one fails, or draws."""
    layouts = [leaf for leaf in question.leaves if isinstance(leaf, Layout)]
    try:
        devices = {leaf.device for leaf in layouts if leaf.device.type == "cuda"}
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            before = generator_states(devices)
            results = [list(tensors_in(question.run(leaves))) for leaves in arguments]
            return results if all(map(torch.equal, before, generator_states(devices))) else []
    except Exception:  # sizes that are this rank's, operators of any kind
        return []


def generator_states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    """Of the generators of the CPU and of these devices."""
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _by_rank(whole: torch.Tensor, of: Layout) -> torch.Tensor:
    """A value like ``of``, each rank's blocks side by side; any other as it is."""
    if not of.blocks or whole.shape != of.whole[0]:
        return whole
    blocks = [block.chunk(of.ranks, of.dim) for block in torch.split(whole, [size * of.ranks for size in of.blocks], of.dim)]
    return torch.cat([part for rank in zip(*blocks, strict=True) for part in rank], of.dim)


def _dim_of(draws: Sequence[tuple[torch.Tensor, list[torch.Tensor]]]) -> int | None:
    """Along which dimension these are the parts of the first, in every draw; None where each is the whole."""
    if all(_same(expected, part) for expected, found in draws for part in found):
        return None
    for dim in range(min(expected.dim() for expected, _ in draws)):
        if all(_are_parts(expected.chunk(len(found), dim), found) for expected, found in draws):
            return dim
    raise MixesShards


def _are_parts(parts: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    return len(parts) == len(found) and all(map(_same, parts, found))


def _same(whole: torch.Tensor, part: torch.Tensor) -> bool:
    kind = torch.complex128  # takes in all others
    near = max(1e-4, 8 * torch.finfo(whole.dtype).eps if whole.is_floating_point() else 0)
    return whole.shape == part.shape and torch.allclose(whole.to(kind), part.to(kind), rtol=near, atol=near, equal_nan=True)
