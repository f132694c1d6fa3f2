"""Unread tensors for the weight conversions of other libraries: their torch calls act on views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .box_view import TensorView, concatenate, stack


class UnreadTensor:
    """A tensor of files that has not been read; ``isinstance`` takes it for a ``torch.Tensor``."""

    def __init__(self, source: TensorView) -> None:
        self.source = source

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """``torch.Tensor``: conversions use ``isinstance`` to tell a tensor from a list of tensors."""
        return torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise NotImplementedError(f"{getattr(func, '__name__', func)}, which needs the whole tensor")
        return handler(*args, **(kwargs or {}))

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.source.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def ndim(self) -> int:
        return len(self.source.shape)

    def reshape(self, *shape: Any) -> UnreadTensor:
        """Return the tensor in another shape, given as one argument or as several."""
        return UnreadTensor(self.source.reshape(shape if isinstance(shape[0], int) else shape[0]))

    view = reshape

    def transpose(self, dim0: int, dim1: int) -> UnreadTensor:
        return _transpose(self, dim0, dim1)

    def size(self, dim: int) -> int:
        return self.source.shape[dim]

    def contiguous(self) -> UnreadTensor:
        """Return the tensor itself; it is contiguous once it is read."""
        return self

    def squeeze(self, dim: int) -> UnreadTensor:
        """Return the tensor without the dimension if its size is 1."""
        return UnreadTensor(self.source.squeeze(dim)) if self.source.shape[dim] == 1 else self

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"{name}, which needs the whole tensor")


def _transpose(tensor: UnreadTensor, dim0: int, dim1: int) -> UnreadTensor:
    return UnreadTensor(tensor.source.transpose(dim0, dim1))


def _split(tensor: UnreadTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[UnreadTensor, ...]:
    dim, whole = dim % len(tensor.shape), tensor.shape[dim]
    each = [min(sizes, whole - at) for at in range(0, whole, sizes)] if isinstance(sizes, int) else list(sizes)
    if sum(each) != whole:
        raise ValueError(f"a size of {whole} cannot be split into {each}")
    starts = [sum(each[:number]) for number in range(len(each))]
    return tuple(UnreadTensor(tensor.source.narrow(dim, start, start + size)) for start, size in zip(starts, each, strict=True))


def _chunk(tensor: UnreadTensor, chunks: int, dim: int = 0) -> tuple[UnreadTensor, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.cat: lambda tensors, dim=0: UnreadTensor(concatenate([each.source for each in tensors], dim)),
    torch.stack: lambda tensors, dim=0: UnreadTensor(stack([each.source for each in tensors], dim)),
    torch.transpose: _transpose,
    torch.split: _split,
    torch.chunk: _chunk,
}
