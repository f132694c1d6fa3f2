"""Disabling of dropout where the masks of two models cannot be equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import torch
from torch import nn


def disable_dropout(model: nn.Module) -> list[tuple[Any, str, float]]:
    """Set the probability of every dropout to 0: of torch's modules, and of attributes of modules and their configs.

    Returns:
        The changed attributes: their holder, name, and former value.
    """
    found: list[tuple[Any, str, float]] = []
    for module in model.modules():
        holders = [module, *(each for name in ("config", "cfg") if (each := vars(module).get(name)) is not None)]
        for holder in holders:
            is_dropout = isinstance(holder, nn.modules.dropout._DropoutNd)
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if ("drop" in name or (is_dropout and name == "p")) and type(value) is float and value > 0:
                    found.append((holder, name, value))
                    setattr(holder, name, 0.0)
    return found


@contextmanager
def dropout_disabled(*models: nn.Module) -> Iterator[int]:
    """Disable dropout in a ``with`` block; yields the number of dropouts."""
    found = [each for model in models for each in disable_dropout(model)]
    try:
        yield len(found)
    finally:
        for holder, name, value in reversed(found):
            setattr(holder, name, value)


def same_random_state(one: Any, other: Any) -> bool:
    """Return True if nothing was drawn between two results of ``rng_state``."""
    ours, theirs = (torch.utils._pytree.tree_leaves(astuple(each)) for each in (one, other))
    equal = lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)  # noqa: E731
    return len(ours) == len(theirs) and all(map(equal, ours, theirs))
