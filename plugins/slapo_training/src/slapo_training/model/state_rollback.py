"""State of a model and random states of the process, restored after extra runs; training and evaluation mode."""

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
from slapo_tracing.recording import PythonRandomState


class TrainingMode:
    """Switches a model between its modes; modules that the user set to ``.eval()`` stay in evaluation mode.

    A model that is in evaluation mode as a whole, e.g. from ``from_pretrained``, trains as a whole.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._frozen = [m for m in root.modules() if not m.training] if root.training else []

    def set(self, training: bool) -> None:
        """Switch the mode if the model is in the other one."""
        if self._root.training != training:
            self._root.train(training)
            self.restore_frozen()

    def restore_frozen(self) -> None:
        """Set the frozen modules to evaluation mode again, after a switch of the whole model."""
        for module in self._frozen:
            module.training = False


_TORCHS_OWN = set(vars(nn.Module()))
"""Attributes of every ``nn.Module``."""


class _Buffers:
    """Snapshot of the buffers of modules, without those of submodules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables = [(module._buffers, dict(module._buffers)) for module in modules]
        buffers = {id(each): each for _, table in self._tables for each in table.values() if each is not None}
        self.values = [(each, each.detach().clone()) for each in buffers.values()]

    def restore(self) -> None:
        with torch.no_grad():
            for table, entries in self._tables:
                table.clear()
                table.update(entries)
            for tensor, value in self.values:
                with torch.inference_mode(tensor.is_inference()):
                    (tensor.resize_(value.shape) if tensor.shape != value.shape else tensor).copy_(value)


class StateSnapshot:
    """Snapshot of this process's random states, and of buffers, attributes and gradients of modules.

    Args:
        modules: The modules; submodules are not included.

    Attributes:
        start: ``rng_fingerprint`` at the snapshot.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = list({id(module): module for module in modules}.values())
        self._torch, self._others = rng_state(), PythonRandomState()
        self.start = self.rng_fingerprint()
        self._buffers = _Buffers(found)
        self._attributes = [(module, _attributes(module)) for module in found if not isinstance(module, fx.GraphModule)]
        tables = [vars(module).get(name) for module in found for name in HOOK_TABLES]
        self._hooks = [(table, set(table)) for table in tables if table is not None]
        parameters = {id(each): each for module in found for each in module._parameters.values() if each is not None}
        self._gradients = [(each, each.grad) for each in parameters.values()]

    def rng_fingerprint(self) -> int:
        """Return a number that is equal for equal random states."""
        now = rng_state()
        states = [*now.devices.items(), *(item for each in now.tracked.values() for item in each.items())]
        numpy = sys.modules.get("numpy.random")
        number = zlib.crc32(pickle.dumps((random.getstate(), numpy.get_state(legacy=False) if numpy else None)))
        for _, state in states:
            number = zlib.crc32(state.cpu().numpy().tobytes(), number)
        return number

    def has_changed(self, buffer: torch.Tensor) -> bool:
        """Return True if a buffer is a new tensor or has new values."""
        return next((not torch.equal(each, value) for each, value in self._buffers.values if each is buffer), True)

    def restore(self) -> None:
        """Restore the snapshot and remove later hooks; the attribute that records a hook's registration is restored too."""
        for hooks, known in self._hooks:
            for key in hooks.keys() - known:
                del hooks[key]
        for module, before in self._attributes:
            _restore(module, before)
        self._buffers.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        set_rng_state(self._torch)
        self._others.restore()


@contextmanager
def buffer_rollback(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context that restores the buffers of modules, so that a second run starts from the same buffers."""
    buffers = _Buffers(modules)
    try:
        yield
    finally:
        buffers.restore()


@contextmanager
def state_rollback(modules: Iterable[nn.Module]) -> Iterator[StateSnapshot]:
    """Context that restores all changes of runs in it; yields the snapshot, which each run may restore first.

    Compiled regions run eagerly, since new shapes would be compiled again.
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
    return {name: (value, value.copy() if type(value) in (list, dict, set, deque) else None) for name, value in own.items()}


def _restore(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    table = vars(module)
    for name in [name for name in table if name not in _TORCHS_OWN and name not in before]:
        del table[name]
    for name, (value, content) in before.items():
        table[name] = value
        if content is not None:
            value.clear()
            value.extend(content) if isinstance(value, (list, deque)) else value.update(content)
