"""Which rank sends what of a tensor, so that one rank has it whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import torch

from slapo_core import BuildError
from slapo_training.model import Chunk, Piece, Ranges

from .tensor_origins import Origin


class Described(NamedTuple):
    """A piece without its numbers.

    Args:
        full_shape: Of the whole tensor.
        ranges: What of it the rank holds.
        dtype: The type that the rank runs it in.
        is_empty: Whether there is nothing of it.
    """

    full_shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    dtype: torch.dtype
    is_empty: bool

    @classmethod
    def of(cls, piece: Piece, dtype: torch.dtype) -> Described:
        """Of a piece that runs in this type."""
        return cls(tuple(piece.full_shape), piece.ranges, dtype, piece.tensor.numel() == 0)

    def chunks(self) -> Iterator[Chunk]:
        """The boxes it consists of."""
        sizes = [sum(stop - start for start, stop in ranges) for ranges in self.ranges]
        shape = [0] if self.is_empty else sizes
        yield from Piece(torch.empty(shape, device="meta"), self.full_shape, self.ranges).chunks()


class Sent(NamedTuple):
    """A box that one rank gives.

    Args:
        place: The rank, by its place among all.
        chunk: Where it lies in its piece and in the whole tensor.
    """

    place: int
    chunk: Chunk


@dataclass(frozen=True)
class Whole:
    """A tensor that is put together.

    Args:
        key: Name of the pieces it is made of.
        shape: Of what is kept of it.
        dtype: In which it is sent.
        parts: Boxes that make it up.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Sent, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def described(name: str, everyone: Sequence[Mapping[str, Described]]) -> Described | None:
    """A tensor as the ranks have it, of which none or some hold something.

    Raises:
        BuildError: they have different ones.
    """
    found = [own[name] for own in everyone if name in own]
    for facts in ({each.full_shape for each in found}, {each.dtype for each in found}):
        if len(facts) > 1:
            both = " and ".join(sorted(map(str, facts))[:2])
            raise BuildError(f"export_weights: the ranks have {name!r} as {both}; give every rank the same model")
    return found[0] if found else None


def whole_of(
    name: str, origin: Origin, everyone: Sequence[Mapping[str, Described]], shape: tuple[int, ...], dtype: torch.dtype
) -> Whole:
    """The boxes, of the first ranks that have them, of what of a tensor lies within a shape.

    Args:
        name: Of the tensor.
        origin: Where it comes from.
        everyone: The pieces of all ranks, by place.
        shape: What is kept of it; it may have more rows.
        dtype: It is sent in.

    Raises:
        BuildError: they leave some of it out.
    """
    held = [(place, own[origin.key].chunks()) for place, own in enumerate(everyone) if origin.key in own]
    pieces = [(place, [*_kept(origin.chunks(chunks), shape)]) for place, chunks in held]
    edges = [{0, size} for size in shape]
    for _, chunks in pieces:
        for chunk in chunks:
            for line, start, size in zip(edges, chunk.offset, chunk.sizes, strict=True):
                line |= {start, start + size}
    lines = [[*pairwise(sorted(line))] for line in edges]
    left = set(product(*lines))
    parts: list[Sent] = []
    for place, chunks in pieces:
        for chunk in chunks:
            covered = {cell for cell in left if _inside(cell, chunk)} if left else set()
            if covered:
                left -= covered
                parts.append(Sent(place, chunk))
    if left:
        missing = sum(math.prod(stop - start for start, stop in cell) for cell in left)
        raise BuildError(
            f"export_weights: no rank has {missing} of the {math.prod(shape)} numbers of {name!r}; build an engine of the "
            "schedule, or call consolidate_model, to give them values"
        )
    return Whole(origin.key, shape, dtype, tuple(parts))


def _kept(chunks: Iterable[Chunk], shape: tuple[int, ...]) -> Iterator[Chunk]:
    """The boxes, without what lies outside of the shape."""
    for chunk in chunks:
        sizes = [min(start + size, end) - start for start, size, end in zip(chunk.offset, chunk.sizes, shape, strict=True)]
        if all(size > 0 for size in sizes):
            yield chunk._replace(sizes=tuple(sizes))


def _inside(cell: tuple[tuple[int, int], ...], chunk: Chunk) -> bool:
    return all(
        start <= low and high <= start + size for (low, high), start, size in zip(cell, chunk.offset, chunk.sizes, strict=True)
    )
