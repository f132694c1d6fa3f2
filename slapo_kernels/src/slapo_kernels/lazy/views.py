"""Lazy versions of torch functions: casts, and views and slices that keep the last dimension whole.

Each returns None if its result cannot be lazy. Then torch's function runs on the values and raises its own errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from .cross_entropy import CrossEntropyOptions, LazyCrossEntropy

if TYPE_CHECKING:
    from .logits import LazyLogits

Found = torch.Tensor | None


def _to(logits: LazyLogits, *args: Any, dtype: Any = None, device: Any = None, **others: Any) -> Found:
    for arg in args:
        dtype, device = (arg, device) if isinstance(arg, torch.dtype) else (dtype, arg)
    same = device is None or (isinstance(device, (str, torch.device)) and torch.device(device) == logits.device)
    if others or not same or not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        return None
    return logits if dtype in (None, logits.dtype) else _lazy_view(logits, lambda values: values, dtype)


def _view(logits: LazyLogits, *shape: Any, **others: Any) -> Found:
    if len(shape) == 1 and isinstance(shape[0], Sequence):
        shape = tuple(shape[0])
    if others or not shape or not all(type(size) is int for size in shape):
        return None
    *batch, last = shape
    if last == -1:
        last = logits.numel() // (math.prod(batch) or 1)
    if last != logits.shape[-1] or (-1 not in batch and math.prod(batch) != math.prod(logits.shape[:-1])):
        return None
    return _lazy_view(logits, lambda values: values.reshape(*batch, values.shape[-1]))


def _flatten(logits: LazyLogits, start_dim: Any = 0, end_dim: Any = -1) -> Found:
    dims = range(-logits.dim(), logits.dim())
    if not (type(start_dim) is type(end_dim) is int and start_dim in dims and end_dim in dims):
        return None
    start, end = start_dim % logits.dim(), end_dim % logits.dim()
    return _lazy_view(logits, lambda values: values.flatten(start, end)) if end < logits.dim() - 1 else None


def _getitem(logits: LazyLogits, index: Any) -> Found:
    parts = list(index) if isinstance(index, tuple) else [index]
    (first, *others) = parts or [None]
    if isinstance(first, torch.Tensor) and not others and first.dtype is torch.bool and 0 < first.dim() < logits.dim():
        return _lazy_view(logits, lambda values: values[index])
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts) or parts.count(Ellipsis) > 1:
        return None
    given = [part for part in parts if part is not Ellipsis]
    reaches = len(given) == logits.dim() or (Ellipsis in parts and parts[-1] is not Ellipsis)
    if reaches and parts[-1] != slice(None):
        return None
    return _lazy_view(logits, lambda values: values[index])


def _lazy_view(logits: LazyLogits, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None) -> Found:
    if logits.requires_grad and not torch.is_grad_enabled():  # a view under no_grad would keep its autograd history
        return None
    try:
        return logits.view_of(change, dtype)
    except (RuntimeError, IndexError, TypeError, ValueError):  # the error would name hidden states, not logits
        return None


def _cross_entropy(
    logits: LazyLogits,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: Any = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: Any = 0.0,
) -> Found:
    if weight is not None or size_average is not None or reduce is not None or label_smoothing or logits.observers:
        return None
    known = type(ignore_index) is int and reduction in ("mean", "sum", "none")
    if not known or not _is_labels(target, logits, ignore_index):
        return None
    source = logits.checked_source()
    logits.observers.record_loss()
    tensors = [source.hidden, source.weight, source.bias]
    if not logits.requires_grad:  # a view that was made without gradients
        tensors = [each if each is None else each.detach() for each in tensors]
    loss = CrossEntropyOptions(source.choice, ignore_index, reduction, _dtype_of_loss(logits), logits.dtype)
    found: torch.Tensor = LazyCrossEntropy.apply(*tensors, logits, target, loss, logits.observers)  # type: ignore[no-untyped-call]
    return found


def _is_labels(target: Any, logits: LazyLogits, ignore_index: int) -> bool:
    """Return whether these are valid labels, one per row. On a GPU their values are not read: its kernels trap on a bad one."""
    if type(target) is not torch.Tensor or target.dtype is not torch.long or target.device != logits.device:
        return False
    if logits.dim() != 2 or target.shape != logits.shape[:1] or not len(target):
        return False
    if target.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    return bool(((target >= 0) & (target < logits.shape[-1]) | (target == ignore_index)).all())


def _dtype_of_loss(logits: LazyLogits) -> torch.dtype:
    kind = logits.device.type
    if not torch.is_autocast_enabled(kind):
        return logits.dtype
    row = torch.zeros(1, 1, dtype=logits.dtype, device=logits.device)
    return F.cross_entropy(row, torch.zeros(1, dtype=torch.long, device=logits.device)).dtype


LAZY_FUNCTIONS: dict[Any, Callable[..., Found]] = {
    F.cross_entropy: _cross_entropy,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.contiguous: lambda logits, **others: None if others else logits,
    torch.Tensor.flatten: _flatten,
    torch.Tensor.float: lambda logits, **others: _to(logits, torch.float32, **others),
    torch.Tensor.reshape: _view,
    torch.Tensor.to: _to,
    torch.Tensor.view: _view,
    torch.flatten: _flatten,
    torch.reshape: _view,
}
"""Torch function to its lazy version."""
