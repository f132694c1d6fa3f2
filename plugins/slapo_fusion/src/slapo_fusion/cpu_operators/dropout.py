"""Dropout in compiled regions: masks drawn by torch's generator on their own, and the rest left to the compiler.

By itself the compiler calls torch's whole dropout for that, which is slower than eager on a CPU: it makes one tensor more.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.needs_exact_strides)
_DRAWS, _BITS = 4, 16
"""How many numbers are made of one draw of 64 bits, and of how many bits each is."""


class Draw(Protocol):
    """``F.dropout``."""

    def __call__(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor: ...


@torch.library.custom_op("slapo::dropout_mask", mutates_args=(), tags=_TAGS)
def dropout_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """What eager torch multiplies ``x`` by on a CPU, of the same random numbers."""
    return torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


@dropout_mask.register_fake
def _(x: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("slapo::fast_dropout_mask", mutates_args=(), tags=_TAGS)
def fast_dropout_mask(x: torch.Tensor, dropped: int) -> torch.Tensor:
    """True where a number is kept; ``dropped`` of 65536 are not. Four numbers for each draw of torch's generator."""
    bits = torch.empty(-(-x.numel() // _DRAWS), dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
    kept = bits.view(torch.int16)[: x.numel()] >= dropped - (1 << _BITS - 1)
    return kept.view(x.shape)


@fast_dropout_mask.register_fake
def _(x: torch.Tensor, dropped: int) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.bool)


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """``F.dropout``, with a mask apart where the numbers are those of a CPU."""
    if not _is_apart(input, p, training, inplace):
        return F.dropout(input, p, training, inplace)
    mask: torch.Tensor = dropout_mask(input.detach(), p)
    return input * mask


def fast_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """A dropout with masks of its own, which take a fraction of the time to draw.

    ``p`` is rounded to a 65536th, and what is kept is scaled by the rounded one, so that its mean is the input. Where that
    would change ``p`` or ``1 - p`` by more than a thousandth, the masks are torch's.
    """
    if not _is_apart(input, p, training, inplace):
        return F.dropout(input, p, training, inplace)
    dropped = round(p * (1 << _BITS))
    rounded = dropped / (1 << _BITS)
    if abs(rounded - p) > 1e-3 * min(p, 1 - p):
        return dropout(input, p, training, inplace)
    mask: torch.Tensor = fast_dropout_mask(input.detach(), dropped)
    return input * (mask.to(input.dtype) * (1 / (1 - rounded)))


def _is_apart(input: torch.Tensor, p: float, training: bool, inplace: bool) -> bool:
    return training and 0 < p < 1 and not inplace and type(input) is torch.Tensor and input.device.type == "cpu"


class Dropout(nn.Module):
    """A dropout drawn so, with the settings of another at the time of the call."""

    def __init__(self, of: nn.Dropout, draw: Draw) -> None:
        super().__init__()
        self.of, self.draw = of, draw

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Of its settings."""
        return self.draw(input, self.of.p, self.of.training, self.of.inplace)
