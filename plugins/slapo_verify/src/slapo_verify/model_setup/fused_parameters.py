"""Parameters that a step made from several of the unmodified model, as a fused projection, or from a part of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from slapo_core import parameter_facts

_ATTRIBUTE = "slapo_made_of"
"""Attribute set by ``slapo_weights.made_of``: the dimension, and the name, range and full size of each part along it."""


class _Piece(NamedTuple):
    """A range of one of the unmodified model's parameters.

    Args:
        dim: Dimension of the range.
        start: Its start.
        stop: Its end.
        size: Size of the full parameter along the dimension.
        value: The values of the range.
    """

    dim: int
    start: int
    stop: int
    size: int
    value: torch.Tensor | None


def is_fused(parameter: torch.Tensor) -> bool:
    """Return True if a parameter records its parts."""
    return not parameter_facts(parameter).names and getattr(parameter, _ATTRIBUTE, None) is not None


def added_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names of trainable parameters that a step created without recording their parts."""
    named = model.named_parameters(remove_duplicate=False)
    unnamed = (name for name, each in named if not (parameter_facts(each).names or is_fused(each)) and each.requires_grad)
    return frozenset(unnamed)


def split_fused(values: Mapping[nn.Parameter, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Return the values of fused parameters, None if missing, under the unmodified model's names, where all parts are there."""
    pieces: dict[str, list[_Piece]] = {}
    for parameter, value in values.items():
        for name, piece in _pieces(parameter, value):
            pieces.setdefault(name, []).append(piece)
    in_order = {name: sorted(found, key=lambda piece: piece.start) for name, found in pieces.items()}
    return {name: _join_pieces(found) for name, found in in_order.items() if _is_whole(found)}


def _pieces(parameter: nn.Parameter, value: torch.Tensor | None) -> Iterator[tuple[str, _Piece]]:
    dim, parts, *_ = getattr(parameter, _ATTRIBUTE)
    at = 0
    for name, (start, stop), size in parts:
        here = value.narrow(dim, at, stop - start) if value is not None else None
        yield name, _Piece(dim, start, stop, size, here)
        at += stop - start


def _is_whole(pieces: Iterable[_Piece]) -> bool:
    at, size = 0, 0
    for piece in pieces:
        if piece.start != at:
            return False
        at, size = piece.stop, piece.size
    return at == size


def _join_pieces(pieces: list[_Piece]) -> torch.Tensor | None:
    known = [piece.value for piece in pieces if piece.value is not None]
    return torch.cat(known, pieces[0].dim) if len(known) == len(pieces) else None
