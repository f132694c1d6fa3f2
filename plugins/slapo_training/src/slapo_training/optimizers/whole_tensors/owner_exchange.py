"""Messages between ranks that hold boxes of whole tensors and the ranks that own these."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence

import torch
import torch.distributed as dist

from slapo_core import BuildError

from ...model.pieces import box_of
from .exchange_routes import Box, ExchangeRoutes, LocalBox, Route, owners_of
from .whole_tensor import WholeTensor

IN_FLIGHT = 3
"""Number of buckets in memory at the same time."""


class OwnerExchange:
    """Gathers whole tensors to their owners, and scatters them back. Collective over the group.

    Args:
        wholes: Whole tensors, the same on every rank of the group.
        owner_of: Owner rank of each tensor; None if every rank gets all tensors.
    """

    def __init__(self, wholes: Sequence[WholeTensor], owner_of: Sequence[int] | None, group: dist.ProcessGroup | None) -> None:
        self._wholes, self._group = wholes, group
        self._rank, self._size = (0, 1) if group is None else (group.rank(), group.size())
        self._owner_of = owner_of
        owners = owners_of(owner_of, len(wholes), self._size)
        self.owned = [number for number in range(len(wholes)) if self._rank in owners[number]]
        self._holdings: Sequence[LocalBox] = ()
        self._routes: ExchangeRoutes | None = None

    def bind(self, holdings: Sequence[LocalBox], labels: Sequence[int]) -> None:
        """Plan the messages for the boxes in this rank's memory. Collective.

        Tensors of one label may be exchanged without the others.

        Raises:
            BuildError: on every rank: the ranks do not hold all of a tensor.
        """
        self._holdings = holdings
        everyone: list[list[Box]] = [[each.box for each in holdings]]
        if self._group is not None:
            everyone *= self._size
            dist.all_gather_object(everyone, [each.box for each in holdings], group=self._group)
        self._check(everyone)
        self._routes = ExchangeRoutes(self._wholes, self._owner_of, self._rank, holdings, labels, everyone)

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

    @property
    def _known_routes(self) -> ExchangeRoutes:
        assert self._routes is not None
        return self._routes

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

        def post(route: Route) -> tuple[Route, torch.Tensor, dist.Work | None]:
            parts = [self._pack(kind, place) for places in route.outgoing for kind in sources for place in places]
            sizes = [len(sources) * sum(self._numel(place) for place in places) for places in route.outgoing]
            got = [len(sources) * sum(math.prod(box[2]) for box in boxes) for boxes in route.incoming]
            return (route, *self._send(self._flat(parts, route), sizes, got))

        for route, received, work in self._post_ahead(_routes_with_labels(self._known_routes.gathers, labels), post):
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

        def post(route: Route) -> tuple[Route, torch.Tensor, dist.Work | None]:
            parts = [box_of(wholes(box[0]), *box[1:]).reshape(-1) for boxes in route.incoming for box in boxes]
            sizes = [sum(math.prod(box[2]) for box in boxes) for boxes in route.incoming]
            got = [sum(self._numel(place) for place in places) for places in route.outgoing]
            return (route, *self._send(self._flat(parts, route), sizes, got))

        for route, received, work in self._post_ahead(_routes_with_labels(self._known_routes.scatters, labels), post):
            if work is not None:
                work.wait()
            at = 0
            for places in route.outgoing:
                for place in places:
                    holding, size = self._holdings[place], self._numel(place)
                    holding.of(targets[holding.place]).copy_(received[at : at + size].view(holding.chunk.sizes))
                    at += size

    def _post_ahead(
        self, routes: Sequence[Route], post: Callable[[Route], tuple[Route, torch.Tensor, dist.Work | None]]
    ) -> Iterator[tuple[Route, torch.Tensor, dist.Work | None]]:
        """Post messages ahead of the bucket that is waited for."""
        waiting: deque[tuple[Route, torch.Tensor, dist.Work | None]] = deque()
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

    def _flat(self, parts: list[torch.Tensor], route: Route) -> torch.Tensor:
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


def _routes_with_labels(routes: Sequence[Route], labels: Container[int] | None) -> list[Route]:
    return [route for route in routes if labels is None or route.label in labels]
