"""Pieces of whole tensors on one rank, in a form common to all engines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from operator import add, sub
from typing import NamedTuple

import torch

from slapo_core import BuildError, ShardSpec

Ranges = tuple[tuple[int, int], ...]
"""Ranges ``(start, stop)`` of one dimension of the whole tensor, in local order."""


class Chunk(NamedTuple):
    """One box of a piece; ``local`` is its offset in the local tensor."""

    local: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        return box_of(local, self.local, self.sizes)

    def of_whole(self, whole: torch.Tensor) -> torch.Tensor:
        return box_of(whole, self.offset, self.sizes)

    def inside(self, offset: Sequence[int], sizes: Sequence[int]) -> Chunk | None:
        """Return the part in a box of the whole tensor; None if there is none."""
        starts = tuple(map(max, self.offset, offset))
        ends = map(min, map(add, self.offset, self.sizes), map(add, offset, sizes))
        kept = tuple(map(sub, ends, starts))
        local = tuple(at + low - start for at, low, start in zip(self.local, starts, self.offset, strict=True))
        return Chunk(local, starts, kept) if all(size > 0 for size in kept) else None


class Span(NamedTuple):
    """Range from ``at`` on in a piece's whole tensor that equals a range of another tensor from ``start`` on."""

    dim: int
    at: int
    start: int
    size: int

    def of(self, chunk: Chunk) -> Chunk | None:
        """Return the intersection of a box with the range, as a box of the other tensor; None if it is empty."""
        low = max(chunk.offset[self.dim], self.at)
        high = min(chunk.offset[self.dim] + chunk.sizes[self.dim], self.at + self.size)
        if low >= high:
            return None
        local = chunk.local[self.dim] + low - chunk.offset[self.dim]
        return Chunk(
            with_dim(chunk.local, self.dim, local),
            with_dim(chunk.offset, self.dim, self.start + low - self.at),
            with_dim(chunk.sizes, self.dim, high - low),
        )


def chunks_of(chunks: Iterable[Chunk], spans: Sequence[Span] | None) -> Iterator[Chunk]:
    """Iterate over the intersections of boxes with ranges, as boxes of the other tensor; without ranges, over the boxes."""
    for chunk in chunks:
        if spans is None:
            yield chunk
        else:
            yield from (part for span in spans if (part := span.of(chunk)) is not None)


def spans_of(dim: int, parts: Iterable[tuple[str, tuple[int, int], int]]) -> Iterator[tuple[str, tuple[Span, ...], bool]]:
    """Iterate over the tensors that a fused one consists of.

    Args:
        dim: Dimension along which the parts are concatenated.
        parts: Name of a tensor, the range of it along ``dim``, and its whole size along ``dim``.

    Yields:
        Name, ranges, and True if each element of the tensor is there once.
    """
    spans: dict[str, list[Span]] = {}
    sizes: dict[str, int] = {}
    at = 0
    for name, (start, stop), size in parts:
        spans.setdefault(name, []).append(Span(dim, at, start, stop - start))
        sizes[name] = size
        at += stop - start
    for name, own in spans.items():
        edges = sorted((span.start, span.start + span.size) for span in own)
        yield name, tuple(own), [0, *(stop for _, stop in edges)] == [*(start for start, _ in edges), sizes[name]]


def with_dim(numbers: Sequence[int], dim: int, number: int) -> tuple[int, ...]:
    """Return a shape or an offset with another number along one dimension."""
    return (*numbers[:dim], number, *numbers[dim + 1 :])


class Piece(NamedTuple):
    """Part of one tensor that one rank holds.

    Args:
        tensor: This rank's local tensor, detached; it may be empty. It is the fp32 master value if the engine has one.
        full_shape: Shape of the tensor in the unmodified model.
        ranges: Ranges of each dimension that this rank holds, in local order. Ranks that hold the same element agree on it.
    """

    tensor: torch.Tensor
    full_shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]

    def chunks(self) -> Iterator[Chunk]:
        """Iterate over the boxes of the piece; none if it is empty."""
        if self.tensor.numel() == 0:
            return
        lines = []
        for ranges in self.ranges:
            sizes = [stop - start for start, stop in ranges]
            befores = [0, *accumulate(sizes)]
            lines.append([(at, start, size) for at, (start, _), size in zip(befores, ranges, sizes, strict=False) if size])
        for box in product(*lines):
            yield Chunk(tuple(at for at, _, _ in box), tuple(start for _, start, _ in box), tuple(size for *_, size in box))

    def rows(self, start: int, stop: int) -> Piece:
        """Return the piece of some rows of the local tensor."""
        return self._replace(tensor=self.tensor[start:stop], ranges=(_clip(self.ranges[0], start, stop), *self.ranges[1:]))

    def box(self, values: torch.Tensor, offset: Sequence[int]) -> Piece:
        """Return the piece of a box of the local tensor."""
        found = zip(self.ranges, offset, values.shape, strict=True)
        return self._replace(tensor=values, ranges=tuple(_clip(each, at, at + size) for each, at, size in found))


def piece_of(
    local: torch.Tensor, spec: ShardSpec | None, shape: Sequence[int] | None = None, rows: tuple[int, int] | None = None
) -> Piece:
    """Return the piece of a local tensor: of a parameter, a buffer, or per-element optimizer state.

    If ``local`` has only the range ``rows`` of this rank's shard, ``shape`` is that of the shard.
    """
    cut = spec if spec is not None and spec.num_shards > 1 else None
    full_shape = tuple(cut.full_shape if cut is not None else local.shape if shape is None else shape)
    ranges: list[Ranges] = [((0, size),) for size in full_shape]
    if cut is not None:
        ranges[cut.dim] = tuple(cut.ranges())
    if rows is not None:
        ranges[0] = _clip(ranges[0], *rows)
    return Piece(local.detach(), full_shape, tuple(ranges))


def assemble(pieces: Iterable[Piece]) -> torch.Tensor:
    """Return the whole tensor assembled from the pieces of all ranks, which are on one device.

    Raises:
        BuildError: the pieces are of different tensors, or do not cover the tensor.
    """
    found = list(pieces)
    full = found[0].tensor.new_empty(found[0].full_shape)
    missing = torch.ones(full.shape, dtype=torch.bool, device=full.device)
    for piece in found:
        if piece.full_shape != found[0].full_shape or piece.tensor.dtype is not full.dtype:
            raise BuildError(f"pieces of {found[0].full_shape} and {piece.full_shape} are not pieces of one tensor")
        for chunk in piece.chunks():
            chunk.of_whole(full).copy_(chunk.of(piece.tensor))
            chunk.of_whole(missing).fill_(False)
    if left := int(missing.sum()):
        raise BuildError(f"the pieces leave out {left} of {full.numel()} elements; give those of all ranks")
    return full


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Iterate over boxes, as offset and sizes, that cover consecutive elements of a tensor in order."""
    row = math.prod(shape[1:])
    while start < stop:
        first, inside = divmod(start, row)
        if inside or stop - start < row:
            end = min(stop, (first + 1) * row)
            for offset, sizes in boxes(shape[1:], inside, end - first * row):
                yield (first, *offset), (1, *sizes)
        else:
            end = stop - stop % row
            yield (first, *(0 for _ in shape[1:])), ((end - start) // row, *shape[1:])
        start = end


def _clip(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the parts of concatenated ranges between two positions."""
    found, at = [], 0
    for low, high in ranges:
        first, last = max(start - at, 0), min(stop - at, high - low)
        if first < last:
            found.append((low + first, low + last))
        at += high - low
    return tuple(found)


def box_of(tensor: torch.Tensor, at: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the box of this offset and shape as a view of a tensor."""
    for dim, (start, size) in enumerate(zip(at, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
