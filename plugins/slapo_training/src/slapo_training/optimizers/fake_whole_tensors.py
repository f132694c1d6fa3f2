"""Steps of an optimizer on whole tensors, run on fake tensors for estimates."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from slapo_core import successor

from ..model.pieces import Chunk
from .probe.update_probe import UpdateDependence, probe
from .whole_tensor_construction import MIN_SHARDED_NUMEL
from .whole_tensors.exchange_routes import BucketElements, ExchangeRoutes, LocalBox, assign_owners
from .whole_tensors.owner_exchange import IN_FLIGHT
from .whole_tensors.whole_tensor import WholeTensor

Collective = tuple[str, int, tuple[int, ...], bool]
"""Fields of a ``CollectiveRecord``."""
Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class SplitTensor(NamedTuple):
    """Parameter of which each of some ranks holds a part.

    Args:
        wholes: Whole tensors in it; several if a primitive fused them.
        chunks: Boxes of the parameter that each of the ranks holds.
        shapes: Shapes of the parts of these ranks.
        ranks: Global ranks that together hold it.
    """

    wholes: Sequence[WholeTensor]
    chunks: Sequence[Sequence[Chunk]]
    shapes: Sequence[tuple[int, ...]]
    ranks: tuple[int, ...]


class FakeWholeTensors:
    """Step of an optimizer of whole tensors; ``prepare`` and ``step`` are called in a ``FakeTensorMode``.

    All tensors are stepped by owner ranks; large ones that an optimizer can step as DTensors need less memory. The
    memory is that of the rank that owns most.

    Args:
        optimizer: Makes the optimizer.
        split: Parameters of which the rank holds a part.
        others: Shapes of the parameters that it holds whole.
        dtype: Type of the parameters.
        is_everywhere: True if each rank steps all tensors.
        rank: Global rank whose messages are counted.
    """

    def __init__(
        self,
        optimizer: Factory,
        split: Sequence[SplitTensor],
        others: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        is_everywhere: bool,
        rank: int,
    ) -> None:
        self._factory, self._dtype, self._is_everywhere, self._rank = optimizer, dtype, is_everywhere, rank
        self._shapes, self._others, self._stepped = others, list[nn.Parameter](), list[nn.Parameter]()
        by_ranks: dict[tuple[int, ...], list[SplitTensor]] = {}
        for one in split:
            by_ranks.setdefault(one.ranks, []).append(one)
        self._groups = [_Group(group, is_everywhere) for group in by_ranks.values()]
        self.optimizer: torch.optim.Optimizer | None = None

    @property
    def may_step_in_place(self) -> bool:
        """True if some tensor is so large that ranks step their parts of it in place if the optimizer can do that."""
        sizes = (math.prod(whole.shape) for group in self._groups for whole in group.wholes)
        return not self._is_everywhere and any(size >= MIN_SHARDED_NUMEL for size in sizes)

    def prepare(self) -> list[torch.Tensor]:
        """Drop tensors that are not stepped; return the parameters that the rank holds whole, and their gradients."""
        self._others = [nn.Parameter(torch.empty(shape, dtype=self._dtype)) for shape in self._shapes]
        for each in self._others:
            each.grad = torch.empty_like(each)
        zero = torch.zeros((), dtype=self._dtype)
        stand_ins = [[nn.Parameter(zero.expand(each.shape)) for each in group.wholes] for group in self._groups]
        made = self._factory([*self._others, *(each for group in stand_ins for each in group)])
        known = {id(each) for group in made.param_groups for each in group["params"]}
        for group, parameters in zip(self._groups, stand_ins, strict=True):
            group.keep([number for number, each in enumerate(parameters) if id(each) in known])
        self._groups = [group for group in self._groups if group.wholes]
        return [*self._others, *(each.grad for each in self._others if each.grad is not None)]

    def step(self) -> None:
        """Gather the owned tensors and their gradients, step, and scatter them; the optimizer's state stays."""
        shapes = [shape for group in self._groups for shape in group.owned_shapes()]
        self._stepped = self._stepped or [nn.Parameter(torch.empty((), dtype=self._dtype)) for _ in shapes]
        for each, shape in zip(self._stepped, shapes, strict=True):
            each.data = torch.empty(shape, dtype=self._dtype)
            each.grad = torch.empty_like(each)
        routes = [[*group.elements(group.largest_owner)] for group in self._groups]
        for some in routes:
            self._exchange((2 * (each.gather_sent + each.gather_received), 2 * each.gather_copied) for each in some)
        self.optimizer = self.optimizer or self._factory([*self._others, *self._stepped])
        self.optimizer.step()
        for some in routes:
            self._exchange((each.scatter_sent + each.scatter_received, each.scatter_copied) for each in some)
        for each in self._stepped:
            each.grad = None
            each.data = each.new_empty(())

    def _exchange(self, sizes: Iterable[tuple[int, int]]) -> None:
        """Allocate the messages of each bucket, of which some elements are copied before."""
        waiting: deque[torch.Tensor] = deque()
        for size, copied in sizes:
            copies = torch.empty(copied, dtype=self._dtype)
            waiting.append(torch.empty(size, dtype=self._dtype))
            del copies
            if len(waiting) == IN_FLIGHT:
                waiting.popleft()

    def collectives(self) -> Iterator[Collective]:
        """Yield the collectives of a step, after ``prepare``: flags of the gradients, values and gradients, new values."""
        for group in self._groups:
            yield "all_reduce", torch.int32.itemsize * len(group.wholes), group.ranks, False
        for group in self._groups:
            for each in group.elements(group.ranks.index(self._rank)):
                for number in (2 * each.gather_sent, each.scatter_sent):
                    yield "all_to_all", number * self._dtype.itemsize, group.ranks, True


class _Group:
    """Whole tensors of the ranks that together hold them."""

    def __init__(self, split: Sequence[SplitTensor], is_everywhere: bool) -> None:
        self.ranks = split[0].ranks
        self.wholes = [whole for each in split for whole in each.wholes]
        self._owners = None if is_everywhere else assign_owners(self.wholes, len(self.ranks))
        self._parts = [each for each in split for _ in each.wholes]

    def keep(self, kept: Collection[int]) -> None:
        """Drop the other tensors; owners stay."""
        self._owners = None if self._owners is None else [self._owners[number] for number in kept]
        self.wholes = [self.wholes[number] for number in kept]
        self._parts = [self._parts[number] for number in kept]

    @property
    def largest_owner(self) -> int:
        """Index of the rank that owns the most elements."""
        loads = [0] * len(self.ranks)
        for whole, owner in zip(self.wholes, self._owners or (), strict=False):
            loads[owner] += math.prod(whole.shape)
        return loads.index(max(loads))

    def owned_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors of the rank that owns the most elements."""
        most, owners = self.largest_owner, self._owners
        return [each.shape for number, each in enumerate(self.wholes) if owners is None or owners[number] == most]

    def elements(self, rank: int) -> Iterator[BucketElements]:
        """Yield the sizes of the messages of a rank, bucket by bucket."""
        pairs = [*zip(self.wholes, self._parts, strict=True)]
        holdings = [
            [
                LocalBox(number, number, chunk)
                for number, (whole, part) in enumerate(pairs)
                for chunk in whole.chunks(part.chunks[place])
            ]
            for place in range(len(self.ranks))
        ]
        everyone = [[each.box for each in own] for own in holdings]
        routes = ExchangeRoutes(self.wholes, self._owners, rank, holdings[rank], [0] * len(self.wholes), everyone)
        return routes.elements([part.shapes[rank] for part in self._parts])


def update_dependence(optimizer: Factory, parameters: Sequence[nn.Parameter]) -> UpdateDependence:
    """Probe the updates of an optimizer of some parameters, which may be on meta; see ``probe``."""
    shapes = [successor(each, torch.zeros((), dtype=each.dtype).expand(each.shape)) for each in parameters]
    return probe(optimizer([each for each in shapes if isinstance(each, nn.Parameter)]))
