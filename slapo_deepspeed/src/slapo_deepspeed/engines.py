"""The open engines of this process.

DeepSpeed's hooks keep an engine that nobody closed, its parameters and its process groups, each with its threads, until the
process ends. One whose process group was destroyed can never run again: the next build takes its hooks off.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn


class Closable(Protocol):
    """An engine."""

    def abandon(self) -> None:
        """Take its hooks off."""


_open: WeakKeyDictionary[Closable, Any] = WeakKeyDictionary()


def add(engine: Closable) -> None:
    """Remember an engine with the default process group it was built in."""
    _open[engine] = dist.group.WORLD


def abandon_stale() -> None:
    """Take the hooks of the engines off whose default process group is no more."""
    for engine, world in [*_open.items()]:
        if world is not dist.group.WORLD:
            del _open[engine]
            engine.abandon()


def forget_modules(module: nn.Module) -> None:
    """Take a model off the list of modules in their forward, where stage 3 of ZeRO leaves every model for good.

    Args:
        module: The model; modules in it, whose forward raised, go too.
    """
    from deepspeed.runtime.zero import parameter_offload

    own = {*module.modules()}
    parameter_offload.FWD_MODULE_STACK[:] = [each for each in parameter_offload.FWD_MODULE_STACK if each not in own]
