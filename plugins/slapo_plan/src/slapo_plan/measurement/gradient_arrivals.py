"""The order in which a backward finishes the gradients of parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from slapo_training import GradientSize

from ..recording.storage_tracker import storage_bytes


class GradientArrivals:
    """Notes the order of gradients in one backward, and puts back those of blocks that were left out.

    Args:
        parameters: Parameters of the stage, before any is freed.
        repeated: Ids of the parameters of blocks that stand for others.
        times: How often these are put back, for each of ``repeated``.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], repeated: Sequence[Collection[int]], times: Sequence[int]) -> None:
        self._parameters = [each for each in parameters if each.requires_grad]
        self._edges = [get_gradient_edge(each) for each in self._parameters]  # a view would allocate a freed storage
        self._times_of = {number: (index, times[index]) for index, ids in enumerate(repeated) for number in ids}
        self._found: dict[int, nn.Parameter] = {}

    @contextmanager
    def note_arrivals(self) -> Iterator[None]:
        """Context of the backward."""
        handles = []
        for parameter, edge in zip(self._parameters, self._edges, strict=True):
            note: Any = partial(self._note, parameter)
            handles.append(edge.node.register_hook(note))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._edges.clear()

    def _note(self, parameter: nn.Parameter, *_: Any) -> None:
        self._found.setdefault(id(parameter), parameter)

    @property
    def num_unused(self) -> int:
        """Number of trainable parameters without a gradient."""
        missing = (each for each in self._parameters if id(each) not in self._found)
        return sum(1 + self._repetition(each)[1] for each in missing)

    def _repetition(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return the index and number of repetitions of the blocks that a parameter belongs to."""
        return self._times_of.get(id(parameter), (-1, 0))

    def sizes(self) -> tuple[GradientSize, ...]:
        """Return the gradients in the order of the backward; those of unused parameters follow."""
        late = [each for each in self._parameters if id(each) not in self._found]
        ordered: list[GradientSize] = []
        for (_, times), some in groupby([*self._found.values(), *late], key=self._repetition):
            sizes = [GradientSize(each.numel(), each.dtype) for each in some]
            ordered += sizes * (1 + times)
        return tuple(ordered)


def gradient_bytes(parameters: Sequence[nn.Parameter]) -> int:
    """Return the bytes of the gradients of some parameters."""
    return storage_bytes(each.grad for each in parameters if each.grad is not None)


def sparse_bytes(parameters: Sequence[nn.Parameter]) -> int:
    """Return the bytes of those that are sparse."""
    return gradient_bytes([each for each in parameters if each.grad is not None and each.grad.layout is torch.sparse_coo])
