"""Ids that a user's function passes to a vocabulary-parallel embedding: global ids, or numbers of this rank's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..rules.sharding_rule import split_of


def with_global_ids(module: nn.Module, given: tuple[Any, ...], found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the result of a function before the module, with local ids replaced by global ones.

    The classic function masks the ids of other ranks and counts its own from 0. The sharded embedding takes global ids, and
    returns zeros for the ids of other ranks.
    """
    applied = split_of(module)
    if applied is None or (applied.cut.input, applied.cut.output) != ("indices", "partial") or not (given and found):
        return found
    before, after = given[0], found[0]
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)) or before.shape != after.shape:
        return found
    ((start, stop),) = applied.spec.ranges()
    owned = (before >= start) & (before < stop)
    is_local = start > 0 and bool(owned.any()) and torch.equal(after[owned], before[owned] - start)
    return (after + start, *found[1:]) if is_local else found
