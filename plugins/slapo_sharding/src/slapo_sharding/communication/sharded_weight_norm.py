"""Norms of weights whose rows are split over the ranks, as DoRA takes them: each is the norm of all parts, and a constant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .collectives import Group, all_reduce

_NORMS = frozenset((torch.linalg.norm, torch.linalg.vector_norm, torch.norm, torch.Tensor.norm))


class NormMode(TorchFunctionMode):
    """Mode in which each norm that a forward takes is what ``given`` makes of it."""

    def __init__(self, given: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.given = given

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        return self.given(found) if func in _NORMS else found


def reduced_norms(group: Group) -> NormMode:
    """Return the mode in which the norm of this rank's part is the norm over the group, without a gradient."""

    def of_all(norm: torch.Tensor) -> torch.Tensor:
        part = norm.detach().to(torch.promote_types(norm.dtype, torch.float32))
        return all_reduce(part.square(), group).sqrt().to(norm.dtype)

    return NormMode(of_all)


def recorded_norms(found: list[torch.Tensor]) -> NormMode:
    """Return the mode that adds the norms of a forward to ``found``."""

    def kept(norm: torch.Tensor) -> torch.Tensor:
        found.append(norm.detach())
        return norm

    return NormMode(kept)


def given_norms(norms: Sequence[torch.Tensor]) -> NormMode:
    """Return the mode in which the norms of a forward are these, one after the other."""
    left = iter(norms)
    return NormMode(lambda norm: next(left, norm))
