"""Conversions of others' on tensors that are not read yet: they call torch, and what they may call is done to boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .box_view import View, concatenated, stacked


class NotRead:
    """A tensor of files that has not been read, to those who take it for a tensor, also by ``isinstance``.

    Args:
        source: What it is made of.
    """

    def __init__(self, source: View) -> None:
        self.source = source

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Of what it stands for: conversions tell a tensor from a list of them so."""
        return torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = _DONE.get(func)
        if done is None:
            raise NotImplementedError(f"{getattr(func, '__name__', func)}, which needs the whole tensor")
        return done(*args, **(kwargs or {}))

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        return torch.Size(self.source.shape)

    @property
    def dtype(self) -> torch.dtype:
        """In the file."""
        return self.source.dtype

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.source.shape)

    def reshape(self, *shape: Any) -> NotRead:
        """In another shape, which is given as one argument or as several."""
        return NotRead(self.source.reshaped(shape if isinstance(shape[0], int) else shape[0]))

    view = reshape

    def transpose(self, dim0: int, dim1: int) -> NotRead:
        """Two dimensions swapped."""
        return _transpose(self, dim0, dim1)

    def size(self, dim: int) -> int:
        """Along a dimension."""
        return self.source.shape[dim]

    def contiguous(self) -> NotRead:
        """It is once it is read."""
        return self

    def squeeze(self, dim: int) -> NotRead:
        """Without the dimension, where its size is 1."""
        return NotRead(self.source.squeezed(dim)) if self.source.shape[dim] == 1 else self

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"{name}, which needs the whole tensor")


def _cat(tensors: Sequence[NotRead], dim: int = 0) -> NotRead:
    return NotRead(concatenated([each.source for each in tensors], dim))


def _stack(tensors: Sequence[NotRead], dim: int = 0) -> NotRead:
    return NotRead(stacked([each.source for each in tensors], dim))


def _transpose(tensor: NotRead, dim0: int, dim1: int) -> NotRead:
    return NotRead(tensor.source.transposed(dim0, dim1))


def _split(tensor: NotRead, sizes: int | Sequence[int], dim: int = 0) -> tuple[NotRead, ...]:
    dim, whole = dim % len(tensor.shape), tensor.shape[dim]
    each = [min(sizes, whole - at) for at in range(0, whole, sizes)] if isinstance(sizes, int) else list(sizes)
    if sum(each) != whole:
        raise ValueError(f"a size of {whole} cannot be split into {each}")
    starts = [sum(each[:number]) for number in range(len(each))]
    return tuple(NotRead(tensor.source.narrow(dim, start, start + size)) for start, size in zip(starts, each, strict=True))


def _chunk(tensor: NotRead, chunks: int, dim: int = 0) -> tuple[NotRead, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


_DONE: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.transpose: _transpose,
    torch.split: _split,
    torch.chunk: _chunk,
}
