"""Runs of a model that leave it, and the process, as they were."""

from __future__ import annotations

import random
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from slapo_core.random import rng_state, set_rng_state
from slapo_core.tracing.sandbox import OtherRandomNumbers

_TORCHS_OWN = set(vars(nn.Module()))
"""Attributes of every module."""


class RandomNumbers:
    """The generators of this process as they are now.

    Attributes:
        start: The ``position`` of these.
    """

    def __init__(self) -> None:
        self._torch, self._others = rng_state(), OtherRandomNumbers()
        self.start = self.position()

    def put_back(self) -> None:
        """Let the same numbers come next as when this was made."""
        set_rng_state(self._torch)
        self._others.put_back()

    def position(self) -> int:
        """Return a number that is equal where the same numbers come next."""
        now = rng_state()
        states = [*now.devices.items(), *(item for each in now.tracked.values() for item in each.items())]
        numpy = sys.modules.get("numpy.random")
        others = repr((random.getstate(), numpy.get_state(legacy=False) if numpy else None))
        number = zlib.crc32(others.encode())
        for _, state in states:
            number = zlib.crc32(state.cpu().numpy().tobytes(), number)
        return number


@contextmanager
def left_alone(modules: Iterable[nn.Module]) -> Iterator[RandomNumbers]:
    """Put back what runs inside change: buffers, gradients, attributes of modules, and random numbers.

    Gives the random numbers from which each run inside may start. Compiled regions run eagerly, as a new shape would have them
    compiled anew.
    """
    found = list({id(module): module for module in modules}.values())
    numbers = RandomNumbers()
    tables = [(module._buffers, dict(module._buffers)) for module in found]
    buffers = {id(each): each for _, table in tables for each in table.values() if each is not None}
    values = [(each, each.detach().clone()) for each in buffers.values()]
    attributes = [(module, _attributes(module)) for module in found if not isinstance(module, fx.GraphModule)]
    parameters = {id(each): each for module in found for each in module._parameters.values() if each is not None}
    gradients = [(each, each.grad) for each in parameters.values()]
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield numbers
        finally:
            for module, before in attributes:
                _put_back(module, before)
            with torch.no_grad():
                for table, entries in tables:
                    table.clear()
                    table.update(entries)
                for tensor, value in values:
                    with torch.inference_mode(tensor.is_inference()):
                        (tensor.resize_(value.shape) if tensor.shape != value.shape else tensor).copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            numbers.put_back()


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A module's own attributes, and what is in those that are containers."""
    own = {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN}
    return {name: (value, _content(value)) for name, value in own.items()}


def _content(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set, deque) else None


def _put_back(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    table = vars(module)
    for name in [name for name in table if name not in _TORCHS_OWN and name not in before]:
        del table[name]
    for name, (value, content) in before.items():
        table[name] = value
        if content is not None:
            value.clear()
            value.extend(content) if isinstance(value, (list, deque)) else value.update(content)
