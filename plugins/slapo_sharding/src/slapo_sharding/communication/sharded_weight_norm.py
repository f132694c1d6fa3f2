"""Norms of weights whose input dimension is sharded, as in DoRA: the norm over all shards, without a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .collectives import Group, all_reduce

_NORMS = frozenset((torch.linalg.norm, torch.linalg.vector_norm, torch.norm, torch.Tensor.norm))


class NormMode(TorchFunctionMode):
    """Mode that passes each norm in a forward through ``replace``."""

    def __init__(self, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.replace = replace

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        return self.replace(found) if func in _NORMS else found


def reduced_norms(group: Group) -> NormMode:
    """Return the mode that turns the norm of this rank's shard into the norm over the group, without a gradient."""

    def reduce_norm(norm: torch.Tensor) -> torch.Tensor:
        part = norm.detach().to(torch.promote_types(norm.dtype, torch.float32))
        return all_reduce(part.square(), group).sqrt().to(norm.dtype)

    return NormMode(reduce_norm)


def recorded_norms(found: list[torch.Tensor]) -> NormMode:
    """Return the mode that appends the norms of a forward to ``found``."""

    def record(norm: torch.Tensor) -> torch.Tensor:
        found.append(norm.detach())
        return norm

    return NormMode(record)


def given_norms(norms: Sequence[torch.Tensor]) -> NormMode:
    """Return the mode that replaces the norms of a forward by ``norms``, in order."""
    left = iter(norms)
    return NormMode(lambda norm: next(left, norm))
