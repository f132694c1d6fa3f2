"""Whole tensors that an optimizer steps, and the places of a rank's shards in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from slapo_core import parameter_facts, successor

from ...gradient_hooks.sharded_hooks import TABLES
from ...model.pieces import Chunk, Span, chunks_of, spans_of, with_dim
from ...options.optimizer_blocks import OptimizerBlocks

MADE_OF = "slapo_made_of"
"""Attribute that a fusing step sets on the new parameter, see ``slapo_weights.made_of``."""


class WholeTensor(NamedTuple):
    """Tensor that the optimizer of the unmodified model would step.

    Args:
        source: This rank's parameter with elements of the tensor.
        dtype: Dtype of the values that the optimizer steps.
        spans: Ranges of the scheduled model's parameter that form the tensor; None if it is that parameter.
    """

    name: str
    shape: tuple[int, ...]
    source: nn.Parameter
    dtype: torch.dtype
    spans: tuple[Span, ...] | None = None

    def chunks(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Convert boxes of the scheduled model's parameter to boxes of this tensor."""
        return chunks_of(chunks, self.spans)

    @property
    def cost(self) -> int:
        """Relative work of a step that multiplies the matrix by itself."""
        return math.prod(self.shape) * (min(self.shape) if len(self.shape) > 1 else 1) + 1


def whole_tensors_of(
    name: str, parameter: nn.Parameter, shape: Sequence[int], dtype: torch.dtype, blocks: OptimizerBlocks | None = None
) -> list[WholeTensor]:
    """Return the whole tensors of a parameter: several if a primitive fused them, or with ``optimizer_blocks``.

    The shape is that of the whole parameter in the scheduled model, the dtype that of the values that the optimizer steps.
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
    """Return True if a primitive made the parameter from several of the unmodified model's, or from ranges of one."""
    made = getattr(parameter, MADE_OF, None)
    return made is not None and not parameter_facts(parameter).names and _spans(made) is not None


def stand_in(whole: WholeTensor, value: torch.Tensor, masks: Mapping[str, torch.Tensor]) -> nn.Parameter:
    """Return a whole parameter in this memory for the optimizer, with the attributes of the rank's, ``masks`` whole."""
    new = cast(nn.Parameter, successor(whole.source, value, spec=None, names=(whole.name,)))
    for table in TABLES:
        setattr(new, table, None)
    vars(new).pop(MADE_OF, None)
    vars(new).update(masks)
    return new


def local_of(value: Any) -> Any:
    """Return the local tensor of a DTensor; return other values unchanged."""
    return value.to_local() if hasattr(value, "to_local") else value  # importing its class takes a second


def _spans(made: Any) -> dict[str, tuple[Span, ...]] | None:
    """Return the ranges of each parameter in a fused one; None unless each is there completely and once."""
    found = [*spans_of(made[0], made[1])]
    return {name: spans for name, spans, _ in found} if all(is_complete for *_, is_complete in found) else None
