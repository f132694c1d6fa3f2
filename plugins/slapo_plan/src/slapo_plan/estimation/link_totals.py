"""Totals of collectives, and of the traffic over each class of links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WITHIN, BETWEEN = "within a node", "between nodes"


@dataclass(frozen=True)
class CollectiveTotal:
    """Equal collectives of one rank in a step.

    Args:
        kind: As in ``CollectiveRecord``.
        axis: Mesh axis of the group; its ranks if it is no axis.
        nbytes: Bytes of one of them.
        count: Number of them.
        rank: Rank along ``pp`` that issues them.
        within: Bytes that a rank of the group sends over the links of its node in one of them, on average; of a message, those
            of its sender. Of groups that lie differently on nodes, those of the one with the most. None without hardware.
        between: The same over the network.
    """

    kind: str
    axis: str
    nbytes: int
    count: int
    rank: int
    within: int | None = None
    between: int | None = None

    @property
    def link(self) -> str | None:
        """Classes of links that it uses, e.g. ``"within a node"``; None without hardware."""
        if self.within is None or self.between is None:
            return None
        if self.between:
            return "within and between nodes" if self.within else BETWEEN
        return WITHIN


@dataclass(frozen=True)
class LinkTotal:
    """Traffic of one rank along ``pp`` over one class of links in a step.

    Args:
        rank: Rank along ``pp``.
        link: ``"within a node"`` or ``"between nodes"``; without hardware the mesh axes of the groups.
        count: Number of collectives and messages in which it sends over these links.
        nbytes: Bytes that it sends. Of the ranks of the other axes, those of the one that sends the most.
        all_bytes: Bytes that all of these ranks send together.
    """

    rank: int
    link: str
    count: int
    nbytes: int
    all_bytes: int


@dataclass(frozen=True)
class TrafficMatrix:
    """Bytes that groups of ranks send to each other in a step.

    Args:
        labels: Names of the groups, e.g. ``"rank 3"`` or ``"ranks 8-15"``.
        sent: Rows of senders with columns of receivers; the diagonal is the traffic within a group.
    """

    labels: Sequence[str]
    sent: Sequence[Sequence[int]]
