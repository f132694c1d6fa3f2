"""Engines that train the same parameters, where one of them keeps memory or gradients of its own.

DeepSpeed's ZeRO takes each gradient of its parameters, whichever engine's backward has made it; Megatron moves parameters and
their gradients into buffers, and out of those of an engine before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol
from weakref import WeakSet

from torch import nn

from slapo_core import BuildError


class Owner(Protocol):
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


_open: WeakSet[Owner] = WeakSet()


def add(engine: Owner) -> None:
    """Remember an engine, and that it has moved the memory of parameters that others train."""
    if engine.moves_parameters:
        for other, name in _owners_sharing(engine.trained_parameters):
            other.superseded = name
    _open.add(engine)


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


def _owners_sharing(named: Mapping[str, nn.Parameter]) -> Iterator[tuple[Owner, str]]:
    """Iterate over open engines that train one of these parameters, and its name."""
    names = {id(parameter): name for name, parameter in named.items() if parameter.requires_grad}
    for other in [*_open]:
        if (
            shared := next((names[id(each)] for each in other.trained_parameters.values() if id(each) in names), None)
        ) is not None:
            yield other, shared
