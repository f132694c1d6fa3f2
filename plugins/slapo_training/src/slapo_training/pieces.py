"""What a rank holds of the model's tensors, and where in the whole ones it lies: the same for every engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

import torch

from slapo_core.errors import BuildError
from slapo_core.parameters import ShardSpec

Ranges = tuple[tuple[int, int], ...]
"""``(start, stop)`` along one dimension of the whole tensor, in the order in which the local tensor has them."""


class Chunk(NamedTuple):
    """One box of a piece.

    Args:
        local: Where it begins in the local tensor, by dimension.
        offset: Where it begins in the whole tensor.
        sizes: Its shape.
    """

    local: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Its part of the local tensor, a view."""
        return _box(local, self.local, self.sizes)

    def of_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """Its part of the whole tensor, a view."""
        return _box(whole, self.offset, self.sizes)


class Piece(NamedTuple):
    """What one rank holds of one tensor.

    Args:
        tensor: This rank's local part, detached; it may be empty. Where an engine keeps a master value, that one, in fp32.
        full_shape: Of the tensor in the unmodified model.
        ranges: Per dimension what of the whole tensor this rank holds, in the local order. What several ranks hold is equal.
    """

    tensor: torch.Tensor
    full_shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]

    def chunks(self) -> Iterator[Chunk]:
        """The boxes it consists of; none where it is empty."""
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
        """The piece that some rows of the local tensor are."""
        return self._replace(tensor=self.tensor[start:stop], ranges=(_clipped(self.ranges[0], start, stop), *self.ranges[1:]))

    def box(self, values: torch.Tensor, offset: Sequence[int]) -> Piece:
        """Return the piece that values are which lie in the local tensor from an offset on.

        Args:
            values: In the shape of the box.
            offset: Where the box begins in the local tensor.
        """
        found = zip(self.ranges, offset, values.shape, strict=True)
        return self._replace(tensor=values, ranges=tuple(_clipped(each, at, at + size) for each, at, size in found))


def piece_of(
    local: torch.Tensor, spec: ShardSpec | None, shape: Sequence[int] | None = None, rows: tuple[int, int] | None = None
) -> Piece:
    """The piece that a local tensor is.

    Args:
        local: A parameter, a buffer, or what an optimizer keeps for each of its elements.
        spec: How it was cut from the whole tensor; None for a whole one.
        shape: Of what ``spec`` gave this rank, where ``local`` is only some rows of that.
        rows: Which ones.
    """
    cut = spec if spec is not None and spec.num_shards > 1 else None
    full_shape = tuple(cut.full_shape if cut is not None else local.shape if shape is None else shape)
    ranges: list[Ranges] = [((0, size),) for size in full_shape]
    if cut is not None:
        ranges[cut.dim] = tuple(cut.ranges())
    if rows is not None:
        ranges[0] = _clipped(ranges[0], *rows)
    return Piece(local.detach(), full_shape, tuple(ranges))


def whole(pieces: Iterable[Piece]) -> torch.Tensor:
    """The whole tensor from what all ranks hold of it, which lies on one device.

    Raises:
        BuildError: the pieces are of different tensors, or leave some of it out.
    """
    found = list(pieces)
    full = found[0].tensor.new_empty(found[0].full_shape)
    missing = torch.ones(full.shape, dtype=torch.bool, device=full.device)
    for piece in found:
        if piece.full_shape != found[0].full_shape or piece.tensor.dtype is not full.dtype:
            raise BuildError(f"pieces of {found[0].full_shape} and {piece.full_shape} are none of one tensor")
        for chunk in piece.chunks():
            chunk.of_whole(full).copy_(chunk.of(piece.tensor))
            chunk.of_whole(missing).fill_(False)
    if left := int(missing.sum()):
        raise BuildError(f"the pieces leave out {left} of {full.numel()} elements; give those of all ranks")
    return full


def _clipped(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Those parts of the ranges, laid out one behind the other, that lie between two places."""
    found, at = [], 0
    for low, high in ranges:
        first, last = max(start - at, 0), min(stop - at, high - low)
        if first < last:
            found.append((low + first, low + last))
        at += high - low
    return tuple(found)


def _box(tensor: torch.Tensor, at: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(at, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
