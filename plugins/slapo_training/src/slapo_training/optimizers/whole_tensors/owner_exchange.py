"""Messages between ranks that hold boxes of whole tensors and the ranks that own these."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from slapo_core import BuildError

from ...model.pieces import Chunk, box_of
from .whole_tensor import WholeTensor

Box = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Index of a whole tensor, and offset and shape of a box in it."""

BUCKET = 2**24
"""Number of elements of the whole tensors in one bucket."""
IN_FLIGHT = 3
"""Number of buckets in memory at the same time."""


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


class _Route(NamedTuple):
    """Messages of one bucket: boxes that this rank sends to each rank, as indices of holdings, and boxes that it receives."""

    label: int
    wholes: tuple[int, ...]
    outgoing: list[list[int]]
    incoming: list[list[Box]]


class OwnerExchange:
    """Gathers whole tensors to their owners, and scatters them back. Collective over the group.

    Args:
        wholes: Whole tensors, the same on every rank of the group.
        owner_of: Owner rank of each tensor; None if every rank gets all tensors.
    """

    def __init__(self, wholes: Sequence[WholeTensor], owner_of: Sequence[int] | None, group: dist.ProcessGroup | None) -> None:
        self._wholes, self._group = wholes, group
        self._rank, self._size = (0, 1) if group is None else (group.rank(), group.size())
        everyone = tuple(range(self._size))
        self._owners = [everyone if owner_of is None else (owner_of[number],) for number in range(len(wholes))]
        self.owned = [number for number in range(len(wholes)) if self._rank in self._owners[number]]
        self._holdings: Sequence[LocalBox] = ()
        self._labels: Sequence[int] = ()
        self._gather_routes: list[_Route] = []
        self._scatter_routes: list[_Route] = []

    def bind(self, holdings: Sequence[LocalBox], labels: Sequence[int]) -> None:
        """Plan the messages for the boxes in this rank's memory. Collective.

        Tensors of one label may be exchanged without the others.

        Raises:
            BuildError: on every rank: the ranks do not hold all of a tensor.
        """
        self._holdings, self._labels = holdings, labels
        everyone: list[list[Box]] = [[each.box for each in holdings]]
        if self._group is not None:
            everyone *= self._size
            dist.all_gather_object(everyone, [each.box for each in holdings], group=self._group)
        self._check(everyone)
        senders = _senders(everyone, self._owners)
        buckets = self._buckets()
        self._gather_routes = [self._gather_route(bucket, everyone, senders) for bucket in buckets]
        self._scatter_routes = [self._scatter_route(bucket, everyone) for bucket in buckets]

    def _check(self, everyone: Sequence[Sequence[Box]]) -> None:
        volumes = [0] * len(self._wholes)
        for number, _, sizes in {box for boxes in everyone for box in boxes}:
            volumes[number] += math.prod(sizes)
        for whole, volume in zip(self._wholes, volumes, strict=True):
            if volume < math.prod(whole.shape):
                raise BuildError(
                    f"the ranks hold {volume} of {math.prod(whole.shape)} elements of {whole.name!r}, which the optimizer "
                    "steps as a whole; use one that steps each element alone, e.g. AdamW"
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
    ) -> _Route:
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
        return _Route(self._labels[bucket[0]], bucket, outgoing, incoming)

    def _scatter_route(self, bucket: tuple[int, ...], everyone: Sequence[Sequence[Box]]) -> _Route:
        """Return the route of a scatter: this rank's holdings by their sender, and the boxes that it sends by receiver."""
        kept = set(bucket)
        held: list[list[int]] = [[] for _ in range(self._size)]
        for place, holding in enumerate(self._holdings):
            if holding.whole in kept:
                held[self._source(holding.whole, self._rank)].append(place)
        sent = [
            [box for box in boxes if box[0] in kept and self._source(box[0], rank) == self._rank]
            for rank, boxes in enumerate(everyone)
        ]
        return _Route(self._labels[bucket[0]], bucket, held, sent)

    def _source(self, whole: int, rank: int) -> int:
        """Return the rank that sends a tensor's boxes to ``rank``; an owner uses its own."""
        owners = self._owners[whole]
        return rank if rank in owners else owners[0]

    # ---- a step

    def has_gradient(self, gradients: Sequence[torch.Tensor | None], device: torch.device) -> list[bool]:
        """Return whether some rank has a gradient of each tensor, given this rank's by place. Collective."""
        flags = torch.zeros(len(self._wholes), dtype=torch.int32)
        for holding in self._holdings:
            flags[holding.whole] |= int(gradients[holding.place] is not None)
        if self._group is not None:
            flags = flags.to(device)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in flags.tolist()]

    def gather(
        self,
        sources: Sequence[Sequence[torch.Tensor | None]],
        targets: Sequence[Callable[[int], torch.Tensor | None]],
        labels: Container[int] | None = None,
    ) -> None:
        """Gather whole tensors, all or those of the labels, to their owners. Collective.

        ``sources`` are this rank's tensors by place, for each kind of value; zeros are sent for None. For each kind of value,
        ``targets`` returns the whole tensor of an index to fill; None to skip it.
        """

        def post(route: _Route) -> tuple[_Route, torch.Tensor, dist.Work | None]:
            parts = [self._pack(kind, place) for places in route.outgoing for kind in sources for place in places]
            sizes = [len(sources) * sum(self._numel(place) for place in places) for places in route.outgoing]
            got = [len(sources) * sum(math.prod(box[2]) for box in boxes) for boxes in route.incoming]
            return (route, *self._send(self._flat(parts, route), sizes, got))

        for route, received, work in self._post_ahead(_routes_with_labels(self._gather_routes, labels), post):
            if work is not None:
                work.wait()
            at = 0
            for boxes in route.incoming:
                for target in targets:
                    for box in boxes:
                        size = math.prod(box[2])
                        if (whole := target(box[0])) is not None:
                            box_of(whole, *box[1:]).copy_(received[at : at + size].view(box[2]))
                        at += size

    def scatter(
        self, wholes: Callable[[int], torch.Tensor], targets: Sequence[torch.Tensor], labels: Container[int] | None = None
    ) -> None:
        """Scatter the whole tensors, all or those of the labels, to the boxes of all ranks. Collective.

        ``wholes`` returns the whole tensor of an index that this rank owns; ``targets`` are this rank's tensors by place.
        """

        def post(route: _Route) -> tuple[_Route, torch.Tensor, dist.Work | None]:
            parts = [box_of(wholes(box[0]), *box[1:]).reshape(-1) for boxes in route.incoming for box in boxes]
            sizes = [sum(math.prod(box[2]) for box in boxes) for boxes in route.incoming]
            got = [sum(self._numel(place) for place in places) for places in route.outgoing]
            return (route, *self._send(self._flat(parts, route), sizes, got))

        for route, received, work in self._post_ahead(_routes_with_labels(self._scatter_routes, labels), post):
            if work is not None:
                work.wait()
            at = 0
            for places in route.outgoing:
                for place in places:
                    holding, size = self._holdings[place], self._numel(place)
                    holding.of(targets[holding.place]).copy_(received[at : at + size].view(holding.chunk.sizes))
                    at += size

    def _post_ahead(
        self, routes: Sequence[_Route], post: Callable[[_Route], tuple[_Route, torch.Tensor, dist.Work | None]]
    ) -> Iterator[tuple[_Route, torch.Tensor, dist.Work | None]]:
        """Post messages ahead of the bucket that is waited for."""
        waiting: deque[tuple[_Route, torch.Tensor, dist.Work | None]] = deque()
        for route in routes:
            waiting.append(post(route))
            if len(waiting) == IN_FLIGHT:
                yield waiting.popleft()
        yield from waiting

    def _pack(self, tensors: Sequence[torch.Tensor | None], place: int) -> torch.Tensor:
        holding = self._holdings[place]
        if (tensor := tensors[holding.place]) is None:
            source = self._wholes[holding.whole].source
            return torch.zeros(self._numel(place), dtype=self._dtype(holding.whole), device=source.device)
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        return holding.of(tensor).reshape(-1).to(self._wholes[holding.whole].source.device, self._dtype(holding.whole))

    def _dtype(self, whole: int) -> torch.dtype:
        return self._wholes[whole].dtype

    def _numel(self, place: int) -> int:
        return math.prod(self._holdings[place].chunk.sizes)

    def _flat(self, parts: list[torch.Tensor], route: _Route) -> torch.Tensor:
        first = route.wholes[0]
        if not parts:
            return torch.empty(0, dtype=self._dtype(first), device=self._wholes[first].source.device)
        return torch.cat([part.to(self._dtype(first)) for part in parts])

    def _send(self, flat: torch.Tensor, sizes: list[int], got: list[int]) -> tuple[torch.Tensor, dist.Work | None]:
        if self._group is None:
            return flat, None
        received = flat.new_empty(sum(got))
        work = dist.all_to_all_single(received, flat, got, sizes, group=self._group, async_op=True)
        return received, work


def _routes_with_labels(routes: Sequence[_Route], labels: Container[int] | None) -> list[_Route]:
    return [route for route in routes if labels is None or route.label in labels]


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
