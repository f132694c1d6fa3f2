"""Steps of an optimizer on whole tensors, run on fake tensors for estimates: the memory of the rank that owns most."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from slapo_core import successor

from .probe.update_probe import UpdateDependence, probe
from .whole_tensors.owner_exchange import BUCKET, IN_FLIGHT, assign_owners
from .whole_tensors.whole_tensor import WholeTensor

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class SplitTensor(NamedTuple):
    """Parameter of which a rank holds a part.

    Args:
        shape: Shape of the whole tensor.
        local: Number of elements on this rank.
        ranks: Number of ranks that together hold it.
    """

    shape: tuple[int, ...]
    local: int
    ranks: int


class FakeWholeTensors:
    """Step of an optimizer of whole tensors; ``prepare`` and ``step`` are called in a ``FakeTensorMode``.

    All tensors are stepped by owner ranks; large ones that an optimizer can step as DTensors need less memory.

    Args:
        optimizer: Makes the optimizer.
        split: Parameters of which the rank holds a part.
        others: Shapes of the parameters that it holds whole.
        dtype: Type of the parameters.
        is_everywhere: True if each rank steps all tensors.
    """

    def __init__(
        self,
        optimizer: Factory,
        split: Sequence[SplitTensor],
        others: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        is_everywhere: bool,
    ) -> None:
        self._factory, self._dtype, self._is_everywhere = optimizer, dtype, is_everywhere
        self._shapes, self._others, self._stepped = others, list[nn.Parameter](), list[nn.Parameter]()
        by_ranks: dict[int, list[SplitTensor]] = {}
        for one in split:
            by_ranks.setdefault(one.ranks, []).append(one)
        self._groups = [(group, self._owned_indices(group)) for group in by_ranks.values()]
        self.optimizer: torch.optim.Optimizer | None = None

    def _owned_indices(self, group: Sequence[SplitTensor]) -> set[int]:
        """Return the indices of the tensors of the rank that owns the most elements."""
        everything = set(range(len(group)))
        if self._is_everywhere:
            return everything
        source = nn.Parameter(torch.empty(0, dtype=self._dtype, device="meta"))
        owners = assign_owners([WholeTensor("", each.shape, source, self._dtype) for each in group], group[0].ranks)
        ranks = [{number for number in everything if owners[number] == rank} for rank in range(group[0].ranks)]
        return max(ranks, key=lambda own: sum(math.prod(group[number].shape) for number in own))

    def prepare(self) -> None:
        """Allocate the parameters that the rank holds whole, and their gradients."""
        self._others = [nn.Parameter(torch.empty(shape, dtype=self._dtype)) for shape in self._shapes]
        for each in self._others:
            each.grad = torch.empty_like(each)

    def step(self) -> None:
        """Gather the owned tensors and their gradients, step, and scatter them; the optimizer's state stays."""
        shapes = [group[number].shape for group, owned in self._groups for number in sorted(owned)]
        self._stepped = self._stepped or [nn.Parameter(torch.empty((), dtype=self._dtype)) for _ in shapes]
        for each, shape in zip(self._stepped, shapes, strict=True):
            each.data = torch.empty(shape, dtype=self._dtype)
            each.grad = torch.empty_like(each)
        self._exchange(2)
        self.optimizer = self.optimizer or self._factory([*self._others, *self._stepped])
        self.optimizer.step()
        self._exchange(1)
        for each in self._stepped:
            each.grad = None
            each.data = each.new_empty(())

    def _exchange(self, kinds: int) -> None:
        for group, owned in self._groups:
            waiting: deque[torch.Tensor] = deque()
            for bucket in _buckets(group):
                times = group[0].ranks if self._is_everywhere else 1
                local = sum(group[number].local for number in bucket) * times
                whole = sum(math.prod(group[number].shape) for number in bucket if number in owned)
                waiting.append(torch.empty(kinds * (local + whole), dtype=self._dtype))
                if len(waiting) == IN_FLIGHT:
                    waiting.popleft()


def _buckets(group: Sequence[SplitTensor]) -> Iterator[list[int]]:
    bucket: list[int] = []
    left = BUCKET
    for number, each in enumerate(group):
        size = math.prod(each.shape)
        if bucket and size > left:
            yield bucket
            bucket, left = [], BUCKET
        bucket.append(number)
        left -= size
    if bucket:
        yield bucket


def update_dependence(optimizer: Factory, parameters: Sequence[nn.Parameter]) -> UpdateDependence:
    """Probe the updates of an optimizer of some parameters, which may be on meta; see ``probe``."""
    shapes = [successor(each, torch.zeros((), dtype=each.dtype).expand(each.shape)) for each in parameters]
    return probe(optimizer([each for each in shapes if isinstance(each, nn.Parameter)]))
