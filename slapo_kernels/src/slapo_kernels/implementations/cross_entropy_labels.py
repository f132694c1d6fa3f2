"""Labels of a cross entropy: what kernels would not notice, or divide by."""

from __future__ import annotations

import torch

from slapo_core import ScheduleError


def check_labels(hidden: torch.Tensor, labels: torch.Tensor) -> None:
    """Refuse labels that are not one for each row; which classes they name is not looked at.

    Raises:
        ScheduleError: they have another shape, or are no whole numbers of 64 bits.
    """
    if labels.shape != hidden.shape[:-1]:
        rows, found = list(hidden.shape[:-1]), list(labels.shape)
        raise ScheduleError(
            f"run('linear_cross_entropy'): labels are of shape {found}, and the rows of hidden states of {rows}"
        )
    if labels.dtype is not torch.long:
        raise ScheduleError(f"run('linear_cross_entropy'): labels are of {labels.dtype}; give them as torch.int64")


def with_one_that_counts(labels: torch.Tensor, ignore_index: int, num_classes: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Labels of which one counts where none did, and whether one did; None where there can be no such.

    ``F.cross_entropy`` of labels that are all ignored has a mean of NaN, and gradients of 0, which others divide by 0.
    """
    if num_classes < 2 or not len(labels):
        return labels, None
    counts = (labels != ignore_index).any()
    first = torch.where(counts, labels[:1], 1 if ignore_index == 0 else 0)
    return torch.cat([first, labels[1:]]), counts


def mean_of(loss: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """The mean, NaN without gradients where no label counted."""
    return loss if counts is None else torch.where(counts, loss, float("nan"))
