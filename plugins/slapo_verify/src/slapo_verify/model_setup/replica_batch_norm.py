"""Modules that compute over data-parallel replicas, where each replica is given the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from slapo_tracing.nodes import forward_wrappers


@contextmanager
def one_replica(model: nn.Module) -> Iterator[None]:
    """Let BatchNorms with statistics over all replicas take their own batch for the whole one.

    Every replica runs the same whole batch here, which counted once per replica would have another unbiased variance.
    """
    wrappers: list[Any] = [
        each for module in model.modules() for each in forward_wrappers(module) if getattr(each, "over_replicas", False)
    ]
    groups = [each.group for each in wrappers]
    for each in wrappers:
        each.group = None
    try:
        yield
    finally:
        for each, group in zip(wrappers, groups, strict=True):
            each.group = group
