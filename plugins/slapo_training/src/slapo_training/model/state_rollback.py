"""Rollback of what extra runs of a model change: its state, and the random numbers of the process."""

from __future__ import annotations

import pickle
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from slapo_core import HOOK_TABLES, rng_state, set_rng_state
from slapo_tracing.recording import SeparateRandomNumbers

_TORCHS_OWN = set(vars(nn.Module()))
"""Attributes of every module."""


class _Buffers:
    """Snapshot of the buffers of modules, each with its own table alone.

    Attributes:
        values: Each buffer with a copy of its numbers.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables = [(module._buffers, dict(module._buffers)) for module in modules]
        buffers = {id(each): each for _, table in self._tables for each in table.values() if each is not None}
        self.values = [(each, each.detach().clone()) for each in buffers.values()]

    def restore(self) -> None:
        """Restore the buffers."""
        with torch.no_grad():
            for table, entries in self._tables:
                table.clear()
                table.update(entries)
            for tensor, value in self.values:
                with torch.inference_mode(tensor.is_inference()):
                    (tensor.resize_(value.shape) if tensor.shape != value.shape else tensor).copy_(value)


class StateSnapshot:
    """Snapshot of this process's random numbers, and of the buffers, attributes and gradients of modules.

    Args:
        modules: Each with its own tables alone, not those of modules in it.

    Attributes:
        start: The ``rng_fingerprint`` of the random numbers.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = list({id(module): module for module in modules}.values())
        self._torch, self._others = rng_state(), SeparateRandomNumbers()
        self.start = self.rng_fingerprint()
        self._buffers = _Buffers(found)
        self._attributes = [(module, _attributes(module)) for module in found if not isinstance(module, fx.GraphModule)]
        tables = [vars(module).get(name) for module in found for name in HOOK_TABLES]
        self._hooks = [(table, set(table)) for table in tables if table is not None]
        parameters = {id(each): each for module in found for each in module._parameters.values() if each is not None}
        self._gradients = [(each, each.grad) for each in parameters.values()]

    def rng_fingerprint(self) -> int:
        """Return a number that is equal where the same random numbers come next."""
        now = rng_state()
        states = [*now.devices.items(), *(item for each in now.tracked.values() for item in each.items())]
        numpy = sys.modules.get("numpy.random")
        number = zlib.crc32(pickle.dumps((random.getstate(), numpy.get_state(legacy=False) if numpy else None)))
        for _, state in states:
            number = zlib.crc32(state.cpu().numpy().tobytes(), number)
        return number

    def has_changed(self, buffer: torch.Tensor) -> bool:
        """Return whether a buffer is another tensor than at first, or other numbers."""
        return next((not torch.equal(each, value) for each, value in self._buffers.values if each is buffer), True)

    def restore(self) -> None:
        """Restore the snapshot, without hooks that were put on modules since: what would put them there twice is undone too."""
        for hooks, known in self._hooks:
            for key in hooks.keys() - known:
                del hooks[key]
        for module, before in self._attributes:
            _restore(module, before)
        self._buffers.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        set_rng_state(self._torch)
        self._others.put_back()


@contextmanager
def buffer_rollback(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the buffers of modules at the end, so that a second run starts from the same ones."""
    buffers = _Buffers(modules)
    try:
        yield
    finally:
        buffers.restore()


@contextmanager
def state_rollback(modules: Iterable[nn.Module]) -> Iterator[StateSnapshot]:
    """Restore at the end what runs inside have changed; yield the snapshot, from which each run may start.

    Compiled regions run eagerly, as a new shape would have them compiled anew.
    """
    state = StateSnapshot(modules)
    with ExitStack() as stack:
        stack.callback(state.restore)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield state


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return a module's own attributes, each with a copy of its content if it is a container."""
    own = {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN}
    return {name: (value, _content(value)) for name, value in own.items()}


def _content(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set, deque) else None


def _restore(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    table = vars(module)
    for name in [name for name in table if name not in _TORCHS_OWN and name not in before]:
        del table[name]
    for name, (value, content) in before.items():
        table[name] = value
        if content is not None:
            value.clear()
            value.extend(content) if isinstance(value, (list, deque)) else value.update(content)
