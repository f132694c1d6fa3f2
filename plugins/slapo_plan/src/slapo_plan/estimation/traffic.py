"""Traffic of a step: bytes that ranks send over links of each class, and from which ranks to which."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ..hardware import Hardware, LinkBytes, link_bytes
from ..records import CollectiveRecord
from .link_totals import BETWEEN, WITHIN, CollectiveTotal, LinkTotal, TrafficMatrix
from .process_groups import MeshGroups
from .rank_labels import rank_labels


class _Edges(NamedTuple):
    """Transfers of equal size in groups whose ranks lie alike on nodes.

    Args:
        sources: Places of the senders in a group.
        targets: Places of the receivers.
        link: Class of the links.
        nbytes: Bytes of each.
    """

    sources: list[int]
    targets: list[int]
    link: str
    nbytes: float


class StepTraffic:
    """Sum of the traffic of all ranks of a mesh.

    Transfers are those that ``collective_seconds`` assumes, drawn as rings: one within each node and one across the nodes for
    each device of a node. An all-to-all sends between all pairs. Memory is some numbers for each rank.

    Args:
        groups: The mesh.
        hardware: The cluster, whose nodes the global ranks fill one after the other; None for a class of links for each axis.
    """

    def __init__(self, groups: MeshGroups, hardware: Hardware | None) -> None:
        self._groups, self._hardware = groups, hardware
        self._size = int(groups.ranks.max()) + 1
        self._labels, self._row_of = rank_labels(groups, hardware)
        self._matrix = torch.zeros(len(self._labels) ** 2, dtype=torch.float64, device="cpu")
        self._bytes: dict[str, torch.Tensor] = {}
        self._counts: dict[str, torch.Tensor] = {}
        self._beyond: set[str] = set()

    def add(self, rank: int, collectives: Mapping[CollectiveRecord, int]) -> list[CollectiveTotal]:
        """Add what all ranks of one rank along ``pp`` send in a step.

        Args:
            rank: Rank along ``pp``.
            collectives: Number of each of the collectives and messages that one of these ranks takes part in.

        Returns:
            Totals of equal collectives.
        """
        totals: Counter[tuple[str, str, int, int | None, int | None]] = Counter()
        volumes: Counter[tuple[str, tuple[int, ...]]] = Counter()
        counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        patterns: dict[tuple[int, ...], list[tuple[list[int], torch.Tensor]]] = {}
        for each, count in collectives.items():
            if each.ranks not in patterns:
                patterns[each.ranks] = [*self._by_pattern(each.ranks, rank)]
            sent = self._largest(each, [pattern for pattern, _ in patterns[each.ranks]])
            parts = (None, None) if sent is None else (round(sent.within), round(sent.between))
            key = (each.kind, self._groups.name(each.ranks), each.nbytes, *parts)
            totals[key] += count
            if len(set(each.ranks)) > 1:
                volumes[each.kind, each.ranks] += each.nbytes * count
                counts[each.kind, each.ranks] += count
        own = torch.zeros(self._size, dtype=torch.bool, device="cpu")
        own[self._groups.stage_ranks(rank)] = True
        for (kind, ranks), volume in volumes.items():
            axis = self._groups.name(ranks)
            if not patterns[ranks]:
                self._beyond.add(axis)
            for pattern, groups in patterns[ranks]:
                self._add_groups(groups, [*_edges(kind, volume, pattern)], counts[kind, ranks], own, axis)
        return [
            CollectiveTotal(kind, axis, nbytes, count, rank, *parts) for (kind, axis, nbytes, *parts), count in totals.items()
        ]

    def links(self) -> list[LinkTotal]:
        """Return the totals of each rank along ``pp`` and class of links."""
        found = []
        for rank in range(self._groups.num_stages):
            own = self._groups.stage_ranks(rank)
            for link in sorted(self._bytes, key=[WITHIN, BETWEEN, *self._bytes].index):
                sent = self._bytes[link][own]
                if (most := round(float(sent.max()))) > 0:
                    count = int(self._counts[link][own].max())
                    found.append(LinkTotal(rank, link, count, most, round(float(sent.sum()))))
        return found

    def matrix(self) -> TrafficMatrix:
        """Return the bytes from groups to groups."""
        rows = self._matrix.reshape(len(self._labels), len(self._labels)).round().long().tolist()
        return TrafficMatrix(self._labels, rows)

    def notes(self) -> list[str]:
        """Return a sentence about what is not counted, if there is any."""
        if not self._beyond:
            return []
        return [f"traffic by link leaves out the groups of {'; '.join(sorted(self._beyond))}, which the mesh does not have"]

    def _by_pattern(self, ranks: Sequence[int], pipeline_rank: int) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield the groups like some ranks that lie alike on nodes, with the node of each place relative to the first."""
        groups = self._groups.groups_like(ranks, pipeline_rank)
        if groups is None:
            return
        if self._hardware is None:
            yield [0] * groups.shape[1], groups
            return
        nodes = groups // self._hardware.devices_per_node
        patterns, index = torch.unique(nodes - nodes[:, :1], dim=0, return_inverse=True)
        for number, pattern in enumerate(patterns.tolist()):
            yield pattern, groups[index == number]

    def _largest(self, record: CollectiveRecord, patterns: Sequence[Sequence[int]]) -> LinkBytes | None:
        """Return the most bytes that a rank sends over each class of links in groups that lie on nodes in some ways."""
        if self._hardware is None or not patterns:
            return None
        sent = []
        for pattern in patterns:
            per_node = Counter(pattern).values()
            sent.append(link_bytes(record.kind, record.nbytes, len(pattern), len(per_node), min(per_node)))
        return LinkBytes(max(each.within for each in sent), max(each.between for each in sent))

    def _add_groups(self, groups: torch.Tensor, edges: Sequence[_Edges], count: int, own: torch.Tensor, axis: str) -> None:
        """Add the transfers in groups that lie alike on nodes; of groups along ``pp`` those of their own sender alone."""
        places: dict[str, set[int]] = defaultdict(set)
        for each in edges:
            link = axis if self._hardware is None else each.link
            sources, targets = groups[:, each.sources].reshape(-1), groups[:, each.targets].reshape(-1)
            is_own = own[sources]
            sources, targets = sources[is_own], targets[is_own]
            nbytes = torch.full(sources.shape, each.nbytes, dtype=torch.float64, device="cpu")
            self._of_link(self._bytes, link, torch.float64).index_add_(0, sources, nbytes)
            self._matrix.index_add_(0, self._row_of[sources] * len(self._labels) + self._row_of[targets], nbytes)
            places[link].update(each.sources)
        for link, senders in places.items():
            ranks = groups[:, sorted(senders)].reshape(-1)
            ranks = ranks[own[ranks]]
            counts = torch.full(ranks.shape, count, dtype=torch.long, device="cpu")
            self._of_link(self._counts, link, torch.long).index_add_(0, ranks, counts)

    def _of_link(self, table: dict[str, torch.Tensor], link: str, dtype: torch.dtype) -> torch.Tensor:
        if link not in table:
            table[link] = torch.zeros(self._size, dtype=dtype, device="cpu")
        return table[link]


def _edges(kind: str, nbytes: int, nodes: Sequence[int]) -> Iterator[_Edges]:
    """Yield the transfers of collectives in a group.

    Args:
        kind: As in ``CollectiveRecord``.
        nbytes: Bytes of the whole tensors.
        nodes: Node of each rank of the group.
    """
    if len(nodes) < 2:
        return
    if kind == "send":
        yield _Edges([0], [1], BETWEEN if nodes[0] != nodes[1] else WITHIN, float(nbytes))
    elif kind == "all_to_all":
        yield from _pairs(nbytes, nodes)
    else:
        yield from _rings(kind, nbytes, nodes)


def _pairs(nbytes: int, nodes: Sequence[int]) -> Iterator[_Edges]:
    size = len(nodes)
    for step in range(1, size):
        for link in (WITHIN, BETWEEN):
            some = [place for place in range(size) if (nodes[place] == nodes[(place + step) % size]) == (link == WITHIN)]
            if some:
                yield _Edges(some, [(place + step) % size for place in some], link, nbytes / size)


def _rings(kind: str, nbytes: int, nodes: Sequence[int]) -> Iterator[_Edges]:
    members: dict[int, list[int]] = defaultdict(list)
    for place, node in enumerate(nodes):
        members[node].append(place)
    rows = [*members.values()]
    for row in rows:
        if len(row) > 1:
            yield _Edges(row, [*row[1:], row[0]], WITHIN, link_bytes(kind, nbytes, len(nodes), len(rows), len(row)).within)
    if len(rows) > 1:
        local = min(map(len, rows))
        across = link_bytes(kind, nbytes, len(nodes), len(rows), local).between
        for place in range(local):
            ring = [row[place] for row in rows]
            yield _Edges(ring, [*ring[1:], ring[0]], BETWEEN, across)
