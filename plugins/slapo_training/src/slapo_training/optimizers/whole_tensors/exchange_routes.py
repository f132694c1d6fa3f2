"""Routes of the messages between ranks that hold boxes of whole tensors and the ranks that own these; nothing is sent here."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ...model.pieces import Chunk
from .whole_tensor import WholeTensor

Box = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Index of a whole tensor, and offset and shape of a box in it."""

BUCKET = 2**24
"""Number of elements of the whole tensors in one bucket."""


class LocalBox(NamedTuple):
    """Box of a whole tensor in this rank's memory.

    Args:
        whole: Index of the whole tensor.
        place: Index of the rank's tensor that has the box.
        chunk: Offsets of the box in that tensor, or in a part of a flat tensor, and in the whole tensor.
        flat: Start and shape of that part in a flat tensor; None if the tensor is not flat.
    """

    whole: int
    place: int
    chunk: Chunk
    flat: tuple[int, tuple[int, ...]] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of the rank's tensor, or of a tensor with the same layout."""
        if self.flat is not None:
            start, shape = self.flat
            tensor = tensor.narrow(0, start, math.prod(shape)).view(shape)
        return self.chunk.of(tensor)

    @property
    def box(self) -> Box:
        """Box in terms of the whole tensor, for other ranks."""
        return self.whole, self.chunk.offset, self.chunk.sizes


def assign_owners(wholes: Sequence[WholeTensor], size: int) -> list[int]:
    """Return the owner rank of each tensor, with balanced work; the same on every rank."""
    loads, found = [0] * size, [0] * len(wholes)
    for number in sorted(range(len(wholes)), key=lambda number: (-wholes[number].cost, number)):
        found[number] = min(range(size), key=lambda rank: (loads[rank], rank))
        loads[found[number]] += wholes[number].cost
    return found


class Route(NamedTuple):
    """Messages of one bucket: boxes that this rank sends to each rank, as indices of holdings, and boxes that it receives."""

    label: int
    wholes: tuple[int, ...]
    outgoing: list[list[int]]
    incoming: list[list[Box]]


class BucketElements(NamedTuple):
    """Numbers of elements of one kind of value in the messages of one bucket.

    Args:
        gather_sent: Elements that this rank sends to owners.
        gather_received: Elements that it receives as an owner.
        scatter_sent: Elements that it sends as an owner.
        scatter_received: Elements that it receives from owners.
        gather_copied: Elements of those to gather whose boxes are copied first.
        scatter_copied: Elements of those to scatter, alike.
    """

    gather_sent: int
    gather_received: int
    scatter_sent: int
    scatter_received: int
    gather_copied: int
    scatter_copied: int


class ExchangeRoutes:
    """Routes of one rank, for each bucket of whole tensors.

    Args:
        wholes: Whole tensors, the same on every rank of the group.
        owner_of: Owner rank of each tensor; None if every rank gets all tensors.
        rank: This rank within the group.
        holdings: Boxes in this rank's memory.
        labels: Label of each tensor; tensors of one label are in buckets of their own.
        everyone: Boxes of all ranks.

    Attributes:
        gathers: Routes to the owners.
        scatters: Routes back: this rank's holdings by their sender, and the boxes that it sends by receiver.
    """

    def __init__(
        self,
        wholes: Sequence[WholeTensor],
        owner_of: Sequence[int] | None,
        rank: int,
        holdings: Sequence[LocalBox],
        labels: Sequence[int],
        everyone: Sequence[Sequence[Box]],
    ) -> None:
        self._wholes, self._rank, self._size = wholes, rank, len(everyone)
        self._owners = owners_of(owner_of, len(wholes), self._size)
        self._holdings, self._labels = holdings, labels
        senders, buckets = _senders(everyone, self._owners), self._buckets()
        self.gathers = [self._gather_route(bucket, everyone, senders) for bucket in buckets]
        self.scatters = [self._scatter_route(bucket, everyone) for bucket in buckets]

    def elements(self, shapes: Sequence[Sequence[int]]) -> Iterator[BucketElements]:
        """Yield the numbers of elements that this rank sends and receives for each bucket, its own included.

        Args:
            shapes: Shapes of this rank's tensors, by place.
        """
        sizes = [math.prod(each.chunk.sizes) for each in self._holdings]
        for gather, scatter in zip(self.gathers, self.scatters, strict=True):
            out, back = ([place for places in each.outgoing for place in places] for each in (gather, scatter))
            owned, sent = ([box for boxes in each.incoming for box in boxes] for each in (gather, scatter))
            yield BucketElements(
                sum(sizes[place] for place in out),
                sum(math.prod(box[2]) for box in owned),
                sum(math.prod(box[2]) for box in sent),
                sum(sizes[place] for place in back),
                sum(
                    sizes[place]
                    for place in out
                    if not is_consecutive(self._holdings[place].chunk.sizes, shapes[self._holdings[place].place])
                ),
                sum(math.prod(box[2]) for box in sent if not is_consecutive(box[2], self._wholes[box[0]].shape)),
            )

    def _buckets(self) -> list[tuple[int, ...]]:
        found: list[list[int]] = []
        left = 0
        for number, whole in enumerate(self._wholes):
            size = math.prod(whole.shape)
            is_other = bool(found) and self._kind(found[-1][0]) != self._kind(number)
            if size > left or is_other:
                found.append([])
                left = BUCKET
            found[-1].append(number)
            left -= size
        return [tuple(each) for each in found]

    def _kind(self, number: int) -> tuple[int, torch.dtype]:
        return self._labels[number], self._wholes[number].dtype

    def _gather_route(
        self, bucket: tuple[int, ...], everyone: Sequence[Sequence[Box]], senders: dict[tuple[Box, int], int]
    ) -> Route:
        kept = set(bucket)
        outgoing: list[list[int]] = [[] for _ in range(self._size)]
        for place, holding in enumerate(self._holdings):
            if holding.whole in kept:
                for owner in self._owners[holding.whole]:
                    if senders[holding.box, owner] == self._rank:
                        outgoing[owner].append(place)
        incoming = [
            [b for b in boxes if b[0] in kept and self._rank in self._owners[b[0]] and senders[b, self._rank] == rank]
            for rank, boxes in enumerate(everyone)
        ]
        return Route(self._labels[bucket[0]], bucket, outgoing, incoming)

    def _scatter_route(self, bucket: tuple[int, ...], everyone: Sequence[Sequence[Box]]) -> Route:
        kept = set(bucket)
        held: list[list[int]] = [[] for _ in range(self._size)]
        for place, holding in enumerate(self._holdings):
            if holding.whole in kept:
                held[self._source(holding.whole, self._rank)].append(place)
        sent = [
            [box for box in boxes if box[0] in kept and self._source(box[0], rank) == self._rank]
            for rank, boxes in enumerate(everyone)
        ]
        return Route(self._labels[bucket[0]], bucket, held, sent)

    def _source(self, whole: int, rank: int) -> int:
        """Return the rank that sends a tensor's boxes to ``rank``; an owner uses its own."""
        owners = self._owners[whole]
        return rank if rank in owners else owners[0]


def is_consecutive(sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Return True if the elements of a box lie one behind the other in a contiguous tensor of a shape."""
    cut = max((dim for dim, pair in enumerate(zip(sizes, shape, strict=True)) if pair[0] != pair[1]), default=0)
    return all(size == 1 for size in sizes[:cut])


def owners_of(owner_of: Sequence[int] | None, number: int, size: int) -> list[tuple[int, ...]]:
    """Return the ranks that get each of ``number`` whole tensors, of ``size`` ranks."""
    return [tuple(range(size)) if owner_of is None else (owner_of[each],) for each in range(number)]


def _senders(everyone: Sequence[Sequence[Box]], owners: Sequence[tuple[int, ...]]) -> dict[tuple[Box, int], int]:
    """Return the rank that sends each box to each owner: the owner itself if it holds the box, else holders in turn."""
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, boxes in enumerate(everyone):
        for box in boxes:
            holders[box].append(rank)
    found: dict[tuple[Box, int], int] = {}
    for turn, (box, ranks) in enumerate(holders.items()):
        for owner in owners[box[0]]:
            found[box, owner] = owner if owner in ranks else ranks[turn % len(ranks)]
    return found
