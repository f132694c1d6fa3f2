"""Rows of a traffic matrix: ranks, or groups of them where there are many."""

from __future__ import annotations

import torch

from ..hardware import Hardware
from .process_groups import MeshGroups

MOST_LABELS = 64
"""Rows of a matrix."""


def rank_labels(groups: MeshGroups, hardware: Hardware | None) -> tuple[list[str], torch.Tensor]:
    """Return the names of the rows, and the index of the row of each global rank.

    A row is a rank; of more than 64 ranks a node, else a rank along ``pp``, else an equal number of neighbours.
    """
    ranks = groups.ranks.reshape(-1).long().sort().values
    first, last = int(ranks[0]), int(ranks[-1])
    width = _width(groups, hardware, first, last)
    numbers, row = torch.unique(ranks // width, return_inverse=True)
    row_of = torch.zeros(last + 1, dtype=torch.long, device="cpu")
    row_of[ranks] = row
    names = []
    for number in numbers.tolist():
        begin, end = max(first, number * width), min(last, (number + 1) * width - 1)
        names.append(f"rank {begin}" if begin == end else f"ranks {begin}-{end}")
    return names, row_of


def _width(groups: MeshGroups, hardware: Hardware | None, first: int, last: int) -> int:
    """Return the number of neighbours that share a row."""
    count = groups.ranks.numel()
    if count <= MOST_LABELS:
        return 1
    if hardware is not None and last // hardware.devices_per_node - first // hardware.devices_per_node < MOST_LABELS:
        return hardware.devices_per_node
    return _stage_width(groups) or -(-(last + 1) // MOST_LABELS)


def _stage_width(groups: MeshGroups) -> int:
    """Return the number of ranks of a pipeline rank if these are neighbours and as many in each, otherwise 0."""
    stages = [groups.stage_ranks(rank) for rank in range(groups.num_stages)]
    width = len(stages[0])
    starts = [int(each.min()) for each in stages]
    are_rows = all(
        int(each.max()) - start + 1 == width and not start % width for each, start in zip(stages, starts, strict=True)
    )
    return width if are_rows and 1 < len(stages) <= MOST_LABELS else 0
