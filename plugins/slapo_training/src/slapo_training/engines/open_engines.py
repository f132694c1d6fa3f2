"""Engines that nobody has closed: the parameters that they train, and those whose process group was destroyed.

DeepSpeed's ZeRO takes each gradient of its parameters, whichever engine's backward has made it. Megatron moves parameters and
their gradients into buffers, and out of those of an engine before. Hooks of both keep an engine, its parameters and its process
groups, each with its threads, until the process ends: the next build takes the hooks of an engine that can never run again off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch import nn

from slapo_core import BuildError


class OpenEngine(Protocol):
    """An engine.

    Attributes:
        moves_parameters: Whether it keeps the memory of parameters or gradients in buffers of its own.
        takes_gradients: Whether its hooks take any gradient of its parameters.
        superseded: Name of a parameter whose memory a newer engine has moved; empty for none.
    """

    moves_parameters: bool
    takes_gradients: bool
    superseded: str

    @property
    def trained_parameters(self) -> Mapping[str, nn.Parameter]:
        """Parameters that it trains, by name; none once it is closed."""


class GroupHolder(Protocol):
    """An engine, or other state of the process, that can be let go without its process group."""

    def abandon(self) -> None:
        """Take its hooks off; touches no other rank."""


_open: WeakSet[OpenEngine] = WeakSet()
_holders: WeakKeyDictionary[GroupHolder, Any] = WeakKeyDictionary()
"""Each with the default process group it was built in."""


def add(engine: OpenEngine) -> None:
    """Remember an engine, and that it has moved the memory of parameters that others train."""
    if engine.moves_parameters:
        for other, name in _owners_sharing(engine.trained_parameters):
            other.superseded = name
    _open.add(engine)


def add_group_holder(holder: GroupHolder) -> None:
    """Remember an engine with the default process group it was built in."""
    _holders[holder] = dist.group.WORLD


def abandon_stale() -> None:
    """Let go of the engines whose default process group is no more."""
    for holder, world in [*_holders.items()]:
        if world is not dist.group.WORLD:
            del _holders[holder]
            holder.abandon()


def check_free(named: Mapping[str, nn.Parameter], takes_gradients: bool) -> None:
    """Refuse to build an engine of parameters whose gradients two engines would take.

    ``takes_gradients`` says whether its own hooks take any gradient of them.

    Raises:
        BuildError: an engine that is still open trains one of them.
    """
    for other, name in _owners_sharing(named):
        if takes_gradients or other.takes_gradients:
            raise BuildError(
                f"{name!r} is trained by another engine that is still open, and ZeRO would take its gradients for both; close "
                "that engine, freeze the parameter here, or use stage 0 of ZeRO or target='torch'"
            )


def _owners_sharing(named: Mapping[str, nn.Parameter]) -> Iterator[tuple[OpenEngine, str]]:
    """Iterate over open engines that train one of these parameters, and its name."""
    names = {id(parameter): name for name, parameter in named.items() if parameter.requires_grad}
    for other in [*_open]:
        shared = [names[id(each)] for each in other.trained_parameters.values() if id(each) in names]
        if shared:
            yield other, shared[0]
