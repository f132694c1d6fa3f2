"""Whole tensors that an optimizer steps, and the places of a rank's parts in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from slapo_core import parameter_facts, successor

from ...gradient_hooks.hook_tables import TABLES
from ...model.pieces import Chunk, Span, chunks_of, with_dim
from ...options.optimizer_blocks import OptimizerBlocks

MADE_OF = "slapo_made_of"
"""Attribute that a fusing step sets on the new parameter, see ``slapo_weights.made_of``."""


class WholeTensor(NamedTuple):
    """Tensor that the optimizer of the unmodified model would step.

    Args:
        name: Its name there.
        shape: Its shape.
        source: This rank's parameter that has some of it.
        dtype: Type of the values that the optimizer steps.
        spans: The ranges of the scheduled model's parameter that it consists of; None where it is that parameter.
    """

    name: str
    shape: tuple[int, ...]
    source: nn.Parameter
    dtype: torch.dtype
    spans: tuple[Span, ...] | None = None

    def chunks(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Give boxes of the scheduled model's parameter as boxes of this tensor."""
        return chunks_of(chunks, self.spans)

    @property
    def cost(self) -> int:
        """Work of a step that multiplies the matrix by itself, in multiplications of some unit."""
        return math.prod(self.shape) * (min(self.shape) if len(self.shape) > 1 else 1) + 1


def whole_tensors_of(
    name: str, parameter: nn.Parameter, shape: Sequence[int], dtype: torch.dtype, blocks: OptimizerBlocks | None = None
) -> list[WholeTensor]:
    """Return the whole tensors that a parameter belongs to: several where a step fused them, or where blocks are asked for.

    Args:
        name: Its name in the unmodified model.
        parameter: This rank's parameter.
        shape: That of the whole parameter in the scheduled model.
        dtype: Type of the values that the optimizer steps.
        blocks: Blocks that are stepped one by one, as the user asks.
    """
    full = tuple(shape)
    made = getattr(parameter, MADE_OF, None)
    if made is not None and not parameter_facts(parameter).names and (spans := _spans(made)) is not None:
        return [
            WholeTensor(part, with_dim(full, made[0], sum(span.size for span in own)), parameter, dtype, own)
            for part, own in spans.items()
        ]
    if blocks is None:
        return [WholeTensor(name, full, parameter, dtype)]
    found, at = [], 0
    for number, size in enumerate(blocks.sizes):
        own = (Span(blocks.dim, at, 0, size),)
        found.append(WholeTensor(f"{name}[{number}]", with_dim(full, blocks.dim, size), parameter, dtype, own))
        at += size
    return found


def is_fused(parameter: nn.Parameter) -> bool:
    """Return whether a step made the parameter of several of the unmodified model's, or of ranges of one."""
    made = getattr(parameter, MADE_OF, None)
    return made is not None and not parameter_facts(parameter).names and _spans(made) is not None


def stand_in(whole: WholeTensor, value: torch.Tensor, masks: Mapping[str, torch.Tensor]) -> nn.Parameter:
    """Return a whole parameter for the optimizer with all that was set on the rank's.

    Args:
        whole: Which one.
        value: Its memory.
        masks: Attributes that are tensors of the whole shape.
    """
    new = cast(nn.Parameter, successor(whole.source, value, spec=None, names=(whole.name,)))
    for table in TABLES:
        setattr(new, table, None)
    vars(new).pop(MADE_OF, None)
    vars(new).update(masks)
    return new


def local_of(value: Any) -> Any:
    """Return what a rank has of a DTensor in its memory, and any other value as it is."""
    return value.to_local() if hasattr(value, "to_local") else value  # importing its class takes a second


def _spans(made: Any) -> dict[str, tuple[Span, ...]] | None:
    """Return the ranges of each parameter in a fused one; None where one of them is not there completely and once."""
    dim, parts = made[0], made[1]
    spans: dict[str, list[Span]] = {}
    at = 0
    for name, (start, stop), _ in parts:
        spans.setdefault(name, []).append(Span(dim, at, start, stop - start))
        at += stop - start
    for name, _, size in parts:
        edges = sorted((span.start, span.start + span.size) for span in spans[name])
        if [0, *(stop for _, stop in edges)] != [*(start for start, _ in edges), size]:
            return None
    return {name: tuple(own) for name, own in spans.items()}
