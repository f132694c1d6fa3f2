"""Modules that compute over data-parallel replicas, for runs in which each replica receives the full batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from slapo_tracing.nodes import forward_wrappers


@contextmanager
def local_batch_statistics(model: nn.Module) -> Iterator[None]:
    """Make BatchNorms with statistics over all replicas use their own batch, in a ``with`` block.

    Every replica runs the same full batch here. Counted once per replica, it would have another unbiased variance.
    """
    found = (each for module in model.modules() for each in forward_wrappers(module))
    wrappers: list[Any] = [each for each in found if getattr(each, "over_replicas", False)]
    groups = [each.group for each in wrappers]
    for each in wrappers:
        each.group = None
    try:
        yield
    finally:
        for each, group in zip(wrappers, groups, strict=True):
            each.group = group
