"""Labels of a cross entropy: checks, and the mean over no label."""

from __future__ import annotations

import torch

from slapo_core import ScheduleError


def check_labels(hidden: torch.Tensor, labels: torch.Tensor) -> None:
    """Check the shape and dtype of labels, but not their values.

    Raises:
        ScheduleError: not one label per row, or another dtype than ``torch.int64``.
    """
    if labels.shape != hidden.shape[:-1]:
        rows, found = list(hidden.shape[:-1]), list(labels.shape)
        raise ScheduleError(
            f"run('linear_cross_entropy'): labels are of shape {found}, and the rows of hidden states of {rows}"
        )
    if labels.dtype is not torch.long:
        raise ScheduleError(f"run('linear_cross_entropy'): labels are of {labels.dtype}; give them as torch.int64")


def with_counted_label(labels: torch.Tensor, ignore_index: int, num_classes: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return labels with at least one that counts, and whether one counted before; None if no label can count.

    ``F.cross_entropy`` of ignored labels alone has a mean of NaN and gradients of 0; other kernels divide 0 by 0.
    """
    if num_classes < 2 or not len(labels):
        return labels, None
    counts = (labels != ignore_index).any()
    first = torch.where(counts, labels[:1], 1 if ignore_index == 0 else 0)
    return torch.cat([first, labels[1:]]), counts


def mean_or_nan(loss: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """Return the mean, or NaN without gradients if no label counted."""
    return loss if counts is None else torch.where(counts, loss, float("nan"))
