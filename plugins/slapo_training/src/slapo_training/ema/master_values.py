"""Values that a rank's optimizer steps in place, and their places in whole tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from slapo_core import Engine, Program

from ..model.named_tensors import Tensors, make_dense
from ..model.pieces import Piece, boxes


class MasterValue(NamedTuple):
    """Values of one parameter or buffer on this rank.

    Args:
        name: First name of the tensor in the unmodified model.
        value: The values, in fp32 if the optimizer keeps fp32 masters; one-dimensional if ``start`` is given.
        place: This rank's piece of the whole tensor; the values of its tensor are not read.
        start: Offset of the values in the flattened piece; None if they are the whole piece.
        is_buffer: True if the tensor is a buffer.
    """

    name: str
    value: torch.Tensor
    place: Piece
    start: int | None = None
    is_buffer: bool = False

    def pieces(self, values: torch.Tensor) -> Iterator[Piece]:
        """Iterate over the whole tensor's boxes that values of the shape of ``value`` fill; the pieces are views."""
        if self.start is None:
            yield self.place._replace(tensor=values.detach())
            return
        at = 0
        for offset, sizes in boxes(tuple(self.place.tensor.shape), self.start, self.start + values.numel()):
            number = torch.Size(sizes).numel()
            part = values.detach().view(-1).narrow(0, at, number).view(sizes)
            yield self.place.box(part, offset)
            at += number


class MasterWeights(Engine):
    """Engine whose trained values can be read, and written in place."""

    program: Program

    @abstractmethod
    def pieces(self) -> dict[str, Piece]:
        """Return this rank's pieces of the parameters and persistent buffers, by their first original names. Collective."""

    @abstractmethod
    def masters(self) -> Iterator[MasterValue]:
        """Iterate over this rank's trained values, which its optimizer steps in place, and over its buffers."""

    def use_masters(self) -> None:
        """Update the model after a write to the values of ``masters``. Collective."""


def master_values(
    stepped: Iterable[tuple[str, torch.Tensor, int]], buffers: Tensors, places: Mapping[str, Piece]
) -> Iterator[MasterValue]:
    """Iterate over values that an optimizer steps, each with the number of elements of its part before it, and buffers."""
    for name, value, start in stepped:
        yield MasterValue(name, value, places[name], None if value.shape == places[name].tensor.shape else start)
    yield from buffer_values(buffers, places)


def buffer_values(buffers: Tensors, places: Mapping[str, Piece]) -> Iterator[MasterValue]:
    """Iterate over the buffers of a rank."""
    for name, buffer in buffers.items():
        make_dense(buffer)
        yield MasterValue(name, buffer, places[name], is_buffer=True)


def copy_of(value: torch.Tensor) -> torch.Tensor:
    """Return a copy for averaging; half precision becomes fp32, which keeps small changes."""
    is_half = value.dtype in (torch.float16, torch.bfloat16)
    return value.detach().to(torch.float32 if is_half else value.dtype, copy=True)


@torch.no_grad()
def lerp(averages: list[torch.Tensor], values: list[torch.Tensor], weight: float) -> None:
    """Interpolate averages towards values by ``weight``, as ``torch.optim.swa_utils.get_ema_multi_avg_fn`` does."""
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for average, value in zip(averages, values, strict=True):
        if not (average.is_floating_point() or average.is_complex()):
            average.copy_(average * (1 - weight) + value.detach() * weight)
            continue
        own, new = alike.setdefault((average.device, average.dtype), ([], []))
        own.append(average)
        new.append(value.detach().to(average.dtype))
    for own, new in alike.values():
        torch._foreach_lerp_(own, new, weight)
