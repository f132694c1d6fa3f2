"""Random numbers decide what torch's rules do not know: do ranks, each with its part, compute the parts of the result?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .followed import Layout, tensors_in

if TYPE_CHECKING:
    from .questions import Question


class Mixed(Exception):
    """An operation needs the parts of other ranks."""


def trial(question: Question, attempt: Sequence[Any], numbers: Mapping[int, torch.Tensor]) -> list[int | None]:
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
    whole, parts = list(attempt), [list(question.leaves) for _ in range(of.ranks)]
    for place, leaf in enumerate(question.leaves):
        if place in numbers:
            if of.shape[of.dim] in numbers[place].shape:  # it may have been made as long as this rank's part
                return []
            for leaves in (whole, *parts):
                leaves[place] = numbers[place].detach().clone()
        elif isinstance(leaf, Layout):
            if not leaf.dtype.is_floating_point:
                return []
            drawn = [torch.randn(leaf.shape, generator=generator).to(leaf.device, leaf.dtype) for _ in parts]
            for part, own in zip(parts, drawn, strict=True):
                part[place] = own.clone()
            blocks = zip(*(torch.split(own, [*leaf.blocks] or own.shape[leaf.dim], leaf.dim) for own in drawn), strict=True)
            whole[place] = torch.cat([part for block in blocks for part in block], leaf.dim)
    results = _results(question, [whole, *parts])
    if len({len(found) for found in results}) != 1:  # heads one by one, say
        return []
    dims = [_dim_of(_by_rank(expected, of), list(found)) for expected, *found in zip(*results, strict=True)]
    return [] if of.blocks and of.whole[0] in [value.shape for value in results[0]] else dims  # it is fused still


def _results(question: Question, arguments: list[list[Any]]) -> list[list[torch.Tensor]]:
    """The tensors that each call returns; empty where one fails, or draws."""
    layouts = [leaf for leaf in question.leaves if isinstance(leaf, Layout)]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices={leaf.device for leaf in layouts if leaf.device.type == "cuda"}):
            before = torch.get_rng_state()
            results = [list(tensors_in(question.run(leaves))) for leaves in arguments]
            return results if torch.equal(before, torch.get_rng_state()) else []
    except Exception:  # sizes that are this rank's, operators of any kind
        return []


def _by_rank(whole: torch.Tensor, of: Layout) -> torch.Tensor:
    """A value like ``of``, each rank's blocks side by side; any other as it is."""
    if not of.blocks or whole.shape != of.whole[0]:
        return whole
    blocks = [block.chunk(of.ranks, of.dim) for block in torch.split(whole, [size * of.ranks for size in of.blocks], of.dim)]
    return torch.cat([part for rank in zip(*blocks, strict=True) for part in rank], of.dim)


def _dim_of(expected: torch.Tensor, found: list[torch.Tensor]) -> int | None:
    """Along which dimension these are the parts; None where each is the whole."""

    kind = torch.complex128  # takes in all others
    near = max(1e-4, 8 * torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0)

    def same(whole: torch.Tensor, part: torch.Tensor) -> bool:
        return whole.shape == part.shape and torch.allclose(whole.to(kind), part.to(kind), rtol=near, atol=near, equal_nan=True)

    if all(same(expected, part) for part in found):
        return None
    for dim in range(expected.dim()):
        parts = expected.chunk(len(found), dim)
        if len(parts) == len(found) and all(map(same, parts, found)):
            return dim
    raise Mixed
