"""Assembly of whole tensors: the boxes that each rank sends to the first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import torch

from slapo_core import BuildError
from slapo_training.model import Chunk, Piece, Ranges

from .tensor_origins import Origin


class PieceDescription(NamedTuple):
    """A piece without its values; ``dtype`` is that in which the rank runs it."""

    full_shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    dtype: torch.dtype
    is_empty: bool

    @classmethod
    def of(cls, piece: Piece, dtype: torch.dtype) -> PieceDescription:
        return cls(tuple(piece.full_shape), piece.ranges, dtype, piece.tensor.numel() == 0)

    def chunks(self) -> Iterator[Chunk]:
        sizes = [sum(stop - start for start, stop in ranges) for ranges in self.ranges]
        shape = [0] if self.is_empty else sizes
        yield from Piece(torch.empty(shape, device="meta"), self.full_shape, self.ranges).chunks()


class SentBox(NamedTuple):
    """A box that the rank of index ``place`` sends."""

    place: int
    chunk: Chunk


@dataclass(frozen=True)
class WholeTensor:
    """A tensor, without padded rows, that the first rank assembles of ``parts``. It is sent in ``dtype``."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[SentBox, ...]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def description_of(name: str, everyone: Sequence[Mapping[str, PieceDescription]]) -> PieceDescription | None:
    """Return the description of a tensor that the ranks agree on; None if no rank holds it.

    Raises:
        BuildError: the ranks have different shapes or dtypes.
    """
    found = [own[name] for own in everyone if name in own]
    for facts in ({each.full_shape for each in found}, {each.dtype for each in found}):
        if len(facts) > 1:
            both = " and ".join(sorted(map(str, facts))[:2])
            raise BuildError(f"export_weights: the ranks have {name!r} as {both}; give every rank the same model")
    return found[0] if found else None


def whole_of(
    name: str, origin: Origin, everyone: Sequence[Mapping[str, PieceDescription]], shape: tuple[int, ...], dtype: torch.dtype
) -> WholeTensor:
    """Choose the boxes that cover a tensor within a shape, without padded rows, each from the first rank that has it.

    Raises:
        BuildError: the pieces do not cover the tensor.
    """
    held = [(place, own[origin.key].chunks()) for place, own in enumerate(everyone) if origin.key in own]
    zeros = (0,) * len(shape)
    pieces = [
        (place, [part for chunk in origin.chunks(chunks) if (part := chunk.inside(zeros, shape)) is not None])
        for place, chunks in held
    ]
    edges = [{0, size} for size in shape]
    for _, chunks in pieces:
        for chunk in chunks:
            for line, start, size in zip(edges, chunk.offset, chunk.sizes, strict=True):
                line |= {start, start + size}
    lines = [[*pairwise(sorted(line))] for line in edges]
    left = set(product(*lines))
    parts: list[SentBox] = []
    for place, chunks in pieces:
        for chunk in chunks:
            covered = {cell for cell in left if _is_inside(cell, chunk)} if left else set()
            if covered:
                left -= covered
                parts.append(SentBox(place, chunk))
    if left:
        missing = sum(math.prod(stop - start for start, stop in cell) for cell in left)
        raise BuildError(
            f"export_weights: no rank has {missing} of the {math.prod(shape)} numbers of {name!r}; build an engine of the "
            "schedule, or call consolidate_model, to give them values"
        )
    return WholeTensor(origin.key, shape, dtype, tuple(parts))


def _is_inside(cell: tuple[tuple[int, int], ...], chunk: Chunk) -> bool:
    return all(
        start <= low and high <= start + size for (low, high), start, size in zip(cell, chunk.offset, chunk.sizes, strict=True)
    )
