"""Engines that nobody closed and that can never run again, as their process group was destroyed.

Hooks of DeepSpeed's and Megatron's keep an engine, its parameters and its process groups, each with its threads, until the
process ends: the next build takes the hooks off.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist


class Engine(Protocol):
    """An engine that can be let go without its process group."""

    def abandon(self) -> None:
        """Take its hooks off; touches no other rank."""


_open: WeakKeyDictionary[Engine, Any] = WeakKeyDictionary()


def add(engine: Engine) -> None:
    """Remember an engine with the default process group it was built in."""
    _open[engine] = dist.group.WORLD


def abandon_stale() -> None:
    """Let go of the engines whose default process group is no more."""
    for engine, world in [*_open.items()]:
        if world is not dist.group.WORLD:
            del _open[engine]
            engine.abandon()
