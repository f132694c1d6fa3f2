"""Labels that do not count, for kernels that divide by how many do."""

from __future__ import annotations

import torch


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
