"""Dropout in compiled regions: a custom operator draws the mask, and the compiler fuses the product.

Without it, the compiler calls torch's whole dropout, which makes one tensor more and is slower than eager on a CPU.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.needs_exact_strides)
_NUMBERS_PER_DRAW, _BITS_PER_NUMBER = 4, 16
"""Numbers per 64-bit draw, and bits per number."""


class DropoutFunction(Protocol):
    """A function with the arguments of ``F.dropout``."""

    def __call__(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor: ...


@torch.library.custom_op("slapo::dropout_mask", mutates_args=(), tags=_TAGS)
def dropout_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """Return the factor by which eager dropout multiplies ``x`` on a CPU, from the same random numbers."""
    return torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


@dropout_mask.register_fake
def _(x: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("slapo::fast_dropout_mask", mutates_args=(), tags=_TAGS)
def fast_dropout_mask(x: torch.Tensor, dropped: int) -> torch.Tensor:
    """Return a mask that is True with probability ``1 - dropped / 65536``, four elements per draw of torch's generator."""
    bits = torch.empty(-(-x.numel() // _NUMBERS_PER_DRAW), dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
    kept = bits.view(torch.int16)[: x.numel()] >= dropped - (1 << _BITS_PER_NUMBER - 1)
    return kept.view(x.shape)


@fast_dropout_mask.register_fake
def _(x: torch.Tensor, dropped: int) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.bool)


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """``F.dropout``, with the mask from a custom operator on a CPU."""
    if not _uses_custom_mask(input, p, training, inplace):
        return F.dropout(input, p, training, inplace)
    mask: torch.Tensor = dropout_mask(input.detach(), p)
    return input * mask


def fast_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout with masks that take a fraction of the time to draw.

    ``p`` is rounded to a multiple of 1/65536, and kept elements are scaled by the rounded value, so the mean is the input. If
    rounding changes ``p`` or ``1 - p`` by more than a thousandth of it, the masks are torch's.
    """
    if not _uses_custom_mask(input, p, training, inplace):
        return F.dropout(input, p, training, inplace)
    dropped = round(p * (1 << _BITS_PER_NUMBER))
    rounded = dropped / (1 << _BITS_PER_NUMBER)
    if abs(rounded - p) > 1e-3 * min(p, 1 - p):
        return dropout(input, p, training, inplace)
    mask: torch.Tensor = fast_dropout_mask(input.detach(), dropped)
    return input * (mask.to(input.dtype) * (1 / (1 - rounded)))


def _uses_custom_mask(input: torch.Tensor, p: float, training: bool, inplace: bool) -> bool:
    return training and 0 < p < 1 and not inplace and type(input) is torch.Tensor and input.device.type == "cpu"


class Dropout(nn.Module):
    """Dropout by a function, with the settings of an ``nn.Dropout`` at the time of the call."""

    def __init__(self, of: nn.Dropout, draw: DropoutFunction) -> None:
        super().__init__()
        self.of, self.draw = of, draw

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the function with the present settings."""
        return self.draw(input, self.of.p, self.of.training, self.of.inplace)
