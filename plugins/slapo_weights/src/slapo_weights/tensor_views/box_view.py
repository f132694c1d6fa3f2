"""Lazy tensors composed of boxes of file tensors; nothing is read before ``read``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TypeVar

import torch

from ..safetensors_files.reader import WeightFiles

_Value = TypeVar("_Value")

_COPIED = 1 << 20
"""Bytes per read of a box that is transposed or cast; the allocator may keep a few times that."""


@dataclass(frozen=True)
class Box:
    """A box of a tensor in a file, and its position in the view.

    Args:
        starts: Start of the box in that tensor, per dimension of it.
        at: Start of the box in the view, per dimension of the view.
        sizes: Shape of the box in the view.
        dims: Dimension of the file's tensor for each dimension of the view; None for a new one of size 1.
    """

    name: str
    starts: tuple[int, ...]
    at: tuple[int, ...]
    sizes: tuple[int, ...]
    dims: tuple[int | None, ...]

    def shift(self, dim: int, by: int) -> Box:
        """Return the box shifted along a dimension of the view."""
        return replace(self, at=(*self.at[:dim], self.at[dim] + by, *self.at[dim + 1 :]))

    def clip(self, dim: int, start: int, stop: int) -> Box | None:
        """Return the part of the box in a range of a dimension, relative to the range; None if it is empty."""
        low, high = max(start, self.at[dim]), min(stop, self.at[dim] + self.sizes[dim])
        if low >= high:
            return None
        starts, of = list(self.starts), self.dims[dim]
        if of is not None:
            starts[of] += low - self.at[dim]
        sizes = (*self.sizes[:dim], high - low, *self.sizes[dim + 1 :])
        return replace(self, starts=tuple(starts), sizes=sizes).shift(dim, low - start - self.at[dim])

    def read(self, files: WeightFiles, out: torch.Tensor) -> None:
        """Read its values into its position in ``out``, a tensor of the view's shape."""
        place = out
        for dim, (start, size) in enumerate(zip(self.at, self.sizes, strict=True)):
            place = place.narrow(dim, start, size)
        held = [dim for dim in self.dims if dim is not None]
        sizes = [1] * len(self.starts)
        for of, size in zip(self.dims, self.sizes, strict=True):
            if of is not None:
                sizes[of] = size
        is_direct = held == sorted(held) and place.is_contiguous() and place.device.type == "cpu"
        if is_direct and place.dtype is files.entries[self.name].dtype:
            files.read(self.name, self.starts, sizes, place.view(sizes))
            return
        if len(parts := [*self._parts(files)]) > 1:
            for part in parts:
                part.read(files, out)
            return
        value = files.read(self.name, self.starts, sizes)
        order = [dim for dim in range(len(sizes)) if dim not in held] + held
        place.copy_(value.permute(order).reshape(self.sizes))

    def _parts(self, files: WeightFiles) -> Iterator[Box]:
        """Yield the box in parts of about a megabyte, in the order of the file."""
        size = prod(self.sizes) * files.entries[self.name].dtype.itemsize
        wide = [dim for dim, width in enumerate(self.sizes) if width > 1 and self.dims[dim] is not None]
        if size <= _COPIED or not wide:
            yield self
            return
        dim = min(wide, key=lambda dim: self.dims[dim] or 0)
        step = max(1, self.sizes[dim] * _COPIED // size)
        for start in range(0, self.sizes[dim], step):
            low = self.at[dim] + start
            part = self.clip(dim, low, min(low + step, self.at[dim] + self.sizes[dim]))
            assert part is not None
            yield part.shift(dim, low)


@dataclass(frozen=True)
class TensorView:
    """A lazy tensor of boxes that do not overlap; elements outside all boxes are zero."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    @classmethod
    def of(cls, files: WeightFiles, name: str) -> TensorView:
        """Return the view of a whole tensor of the files."""
        entry = files.entries[name]
        zeros = (0,) * len(entry.shape)
        return cls(entry.shape, entry.dtype, (Box(name, zeros, zeros, entry.shape, tuple(range(len(zeros)))),))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(box.name for box in self.boxes))

    def narrow(self, dim: int, start: int, stop: int) -> TensorView:
        """Return a range along a dimension."""
        boxes = tuple(part for box in self.boxes if (part := box.clip(dim, start, stop)) is not None)
        return replace(self, shape=(*self.shape[:dim], stop - start, *self.shape[dim + 1 :]), boxes=boxes)

    def local(self, dim: int, ranges: Sequence[tuple[int, int]]) -> TensorView:
        """Return the concatenated ranges along a dimension."""
        return concatenate([self.narrow(dim, start, stop) for start, stop in ranges], dim)

    def transpose(self, first: int, second: int) -> TensorView:
        order = list(range(len(self.shape)))
        order[first], order[second] = order[second], order[first]
        return self._permute(order)

    def unsqueeze(self, dim: int) -> TensorView:
        """Return the view with a new dimension of size 1."""
        dim %= len(self.shape) + 1
        boxes = tuple(
            replace(box, at=_put(box.at, dim, 0), sizes=_put(box.sizes, dim, 1), dims=_put(box.dims, dim, None))
            for box in self.boxes
        )
        return replace(self, shape=_put(self.shape, dim, 1), boxes=boxes)

    def squeeze(self, dim: int) -> TensorView:
        """Return the view without a dimension of size 1."""
        dim %= len(self.shape)
        boxes = tuple(
            replace(box, at=_remove(box.at, dim), sizes=_remove(box.sizes, dim), dims=_remove(box.dims, dim))
            for box in self.boxes
        )
        return replace(self, shape=_remove(self.shape, dim), boxes=boxes)

    def reshape(self, shape: Sequence[int]) -> TensorView:
        """Return the view in another shape, in row-major order; -1 is the size that fits.

        A dimension that is split or merged becomes several boxes.

        Raises:
            ValueError: the numbers of elements differ, or a dimension would have to be both split and merged.
        """
        sizes = list(shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = prod(self.shape) // max(1, -prod(sizes))
        if prod(sizes) != prod(self.shape):
            raise ValueError(f"{list(self.shape)} cannot be {list(shape)}")
        if not prod(sizes):
            return replace(self, shape=(*sizes,), boxes=())
        view = self
        for dim, size in enumerate(sizes):
            while dim < len(view.shape) - 1 and size % view.shape[dim] == 0 and view.shape[dim] < size:
                view = view._merge_dims(dim)
            if dim == len(view.shape):
                view = view.unsqueeze(dim)
            elif view.shape[dim] != size:
                view = view._split(dim, size)
        while len(view.shape) > len(sizes):
            view = view.squeeze(-1)
        return view

    def _merge_dims(self, dim: int) -> TensorView:
        inner = self.shape[dim + 1]
        if inner == 1:
            return self.squeeze(dim + 1)
        boxes = []
        for box in self.boxes:
            for outer in range(box.at[dim], box.at[dim] + box.sizes[dim]):
                part = box.clip(dim, outer, outer + 1)
                assert part is not None
                part = part.shift(dim + 1, outer * inner)
                boxes.append(
                    replace(part, at=_remove(part.at, dim), sizes=_remove(part.sizes, dim), dims=_remove(part.dims, dim))
                )
        return replace(self, shape=_put(_remove(_remove(self.shape, dim), dim), dim, inner * self.shape[dim]), boxes=(*boxes,))

    def _split(self, dim: int, size: int) -> TensorView:
        """Split a dimension into one of a size and the rest."""
        inner, rest = divmod(self.shape[dim], size)
        if rest:
            raise ValueError(f"{self.shape[dim]} cannot be parts of {size}")
        boxes = []
        for box in self.boxes:
            for outer in range(box.at[dim] // inner, -(-(box.at[dim] + box.sizes[dim]) // inner)):
                part = box.clip(dim, outer * inner, (outer + 1) * inner)
                assert part is not None
                boxes.append(
                    replace(part, at=_put(part.at, dim, outer), sizes=_put(part.sizes, dim, 1), dims=_put(part.dims, dim, None))
                )
        return replace(self, shape=_put(_put(_remove(self.shape, dim), dim, inner), dim, size), boxes=(*boxes,))

    def pad(self, size: int, dim: int = 0) -> TensorView:
        """Return the view padded with zeros to a size along a dimension."""
        return replace(self, shape=_put(_remove(self.shape, dim), dim, size))

    def read(self, files: WeightFiles, dtype: torch.dtype) -> torch.Tensor:
        """Read the tensor to the CPU; only its own bytes are read."""
        covered = sum(prod(box.sizes) for box in self.boxes) == prod(self.shape)
        out = (torch.empty if covered else torch.zeros)(self.shape, dtype=dtype)
        for box in self.boxes:
            box.read(files, out)
        return out

    def _permute(self, order: Sequence[int]) -> TensorView:
        def of(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(values[dim] for dim in order)

        boxes = tuple(
            replace(box, at=of(box.at), sizes=of(box.sizes), dims=tuple(box.dims[dim] for dim in order)) for box in self.boxes
        )
        return replace(self, shape=of(self.shape), boxes=boxes)


def concatenate(views: Sequence[TensorView], dim: int) -> TensorView:
    """Concatenate views along a dimension; raise ``ValueError`` if they differ in dtype or in another size."""
    first = views[0]
    dim %= len(first.shape)
    if any(each.dtype is not first.dtype or _remove(each.shape, dim) != _remove(first.shape, dim) for each in views):
        told = ", ".join(sorted({f"{each.dtype} {list(each.shape)}" for each in views}))
        raise ValueError(f"tensors of {told} do not go together")
    stops = [*accumulate(each.shape[dim] for each in views)]
    boxes = tuple(box.shift(dim, stop - each.shape[dim]) for each, stop in zip(views, stops, strict=True) for box in each.boxes)
    return replace(first, shape=(*first.shape[:dim], stops[-1], *first.shape[dim + 1 :]), boxes=boxes)


def stack(views: Sequence[TensorView], dim: int) -> TensorView:
    """Stack views along a new dimension."""
    return concatenate([each.unsqueeze(dim) for each in views], dim % (len(views[0].shape) + 1))


def _put(values: tuple[_Value, ...], at: int, value: _Value) -> tuple[_Value, ...]:
    return (*values[:at], value, *values[at:])


def _remove(values: tuple[_Value, ...], at: int) -> tuple[_Value, ...]:
    return (*values[:at], *values[at + 1 :])
