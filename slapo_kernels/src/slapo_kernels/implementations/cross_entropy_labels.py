"""Fused cross entropies of a head: checks of labels, casts of autocast, and the mean over no label."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slapo_core import ScheduleError


def check_labels(hidden: torch.Tensor, labels: torch.Tensor) -> None:
    """Raise ``ScheduleError`` unless there is one label of ``torch.int64`` per row; values are not checked."""
    if labels.shape != hidden.shape[:-1]:
        rows, found = list(hidden.shape[:-1]), list(labels.shape)
        raise ScheduleError(
            f"run('linear_cross_entropy'): labels are of shape {found}, and the rows of hidden states of {rows}"
        )
    if labels.dtype is not torch.long:
        raise ScheduleError(f"run('linear_cross_entropy'): labels are of {labels.dtype}; give them as torch.int64")


def fused_cross_entropy(
    loss_of: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the kernel ``linear_cross_entropy`` by ``loss_of``, in at least float32.

    Args:
        loss_of: Function of ``[rows, size]``, weight, one label per row, bias, ``ignore_index`` and ``reduction``.
        hidden: This and the others: as the eager implementation.
    """
    check_labels(hidden, labels)
    rows, targets, counts = hidden.flatten(0, -2), labels.flatten(), None
    if is_autocast(rows):  # it casts the inputs of a matrix product, but does not know these functions
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if reduction == "mean":
        targets, counts = _with_counted_label(targets, ignore_index, len(weight))
    loss = loss_of(rows, weight, targets, bias, ignore_index, reduction)
    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
    if counts is not None:
        loss = torch.where(counts, loss, float("nan"))
    return loss.view(labels.shape) if reduction == "none" else loss


def is_autocast(tensor: torch.Tensor) -> bool:
    """Return whether autocast is enabled for the tensor's device."""
    return torch.is_autocast_enabled(tensor.device.type)


def _with_counted_label(labels: torch.Tensor, ignore_index: int, num_classes: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return labels with at least one that counts, and whether one counted before; None if no label can count.

    ``F.cross_entropy`` of ignored labels alone has a mean of NaN and gradients of 0; other kernels divide 0 by 0.
    """
    if num_classes < 2 or not len(labels):
        return labels, None
    counts = (labels != ignore_index).any()
    first = torch.where(counts, labels[:1], 1 if ignore_index == 0 else 0)
    return torch.cat([first, labels[1:]]), counts
