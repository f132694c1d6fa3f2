"""Indexing of tensors without values by masks with values: the shape of the result is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_INDEXING = frozenset(
    (
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        torch.ops.aten._unsafe_index.Tensor,
        torch.ops.aten._unsafe_index_put.default,
    )
)
_SELECT = torch.ops.aten.masked_select.default


def is_indexing_by_positions(func: Any, args: Any) -> bool:
    """Return True if an operator indexes by integers alone: the shape of its result does not depend on their values."""
    return func in _INDEXING and all(index is None or not _is_mask(index) for index in args[1])


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def with_positions(func: Any, args: Any, has_values: Callable[[Any], bool]) -> tuple[Any, Any]:
    """Return an operator and its arguments with each mask with values replaced by the positions of its true elements.

    Rewrite:
        x[mask]  -->  x[mask.nonzero(as_tuple=True)]

    Args:
        func: Operator.
        args: Its arguments.
        has_values: Returns True for a tensor with values.
    """
    if func is _SELECT and has_values(args[1]):
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        mask = args[1].expand(shape)
        return torch.ops.aten.new_empty.default, (args[0], [int(mask.sum())])
    if func not in _INDEXING:
        return func, args
    positions: list[Any] = []
    for index in args[1]:
        is_known_mask = index is not None and _is_mask(index) and has_values(index)
        positions += index.nonzero().unbind(1) if is_known_mask else [index]
    return func, (args[0], positions, *args[2:])
