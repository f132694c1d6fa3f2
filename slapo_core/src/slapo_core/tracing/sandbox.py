"""Run a model's forward without leaving a trace in the model: on fake tensors, or on real ones and copies of its buffers."""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from ..errors import TraceError
from . import _torch_private as private
from .structures import tensors

_CONTAINERS = (list, dict, set, deque)
_OF_TORCH = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, _CONTAINERS))
_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_forward_hooks", "_forward_pre_hooks")


class Sandbox:
    """Stand-ins for the tensors of a model.

    Args:
        root: The model; its weights may be on the meta device when ``fake``.
        inputs: What its forward gets, to know the device the stand-ins claim to be on.
        fake: Fake tensors; otherwise real parameters and cloned buffers.
    """

    def __init__(self, root: nn.Module, inputs: Any, *, fake: bool) -> None:
        self.root, self.fake = root, fake
        self.mode = private.FakeTensorMode(allow_non_fake_inputs=True)
        self.originals: dict[int, torch.Tensor] = {}
        """Stand-in (by id) to the model's own tensor."""
        self.before = None if fake else {id(value) for value in gc.get_objects() if issubclass(type(value), torch.Tensor)}
        self.attributes: dict[int, dict[str, Any]] = {}
        self._standins: dict[int, torch.Tensor] = {}
        devices = [tensor.device for tensor in tensors(inputs) if not tensor.is_meta]
        self.device = devices[0] if devices else torch.device("cpu")

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor like this one, without history."""
        return private.fake_like(self.mode, tensor, self.device if tensor.is_meta else None)

    def enter_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """A stand-in for an input: a change in place does not reach the caller's tensor."""
        if self.fake:
            return self.fake_of(tensor)
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor was made since the sandbox was opened."""
        return self.before is not None and id(tensor) not in self.before

    @contextmanager
    def open(self) -> Iterator[None]:
        """Stand-ins are in the model, gradients on, and afterwards model and random numbers are as before."""
        modules = list(self.root.modules())
        self.random_numbers = OtherRandomNumbers()
        self.forget_results = _forget_results(modules)
        restore = [*_snapshot(modules), self.random_numbers.put_back, self.forget_results]
        devices = [] if self.fake or self.device.type != "cuda" else [self.device]
        try:
            with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
                self._swap(modules)
                if self.fake:
                    with self.mode, private.quiet():
                        yield
                else:
                    yield
        finally:
            for undo in restore:
                undo()

    def check_unchanged(
        self, modules: Iterable[nn.Module], moved: Callable[[Any, Any], bool], varies: Callable[[Any], bool]
    ) -> None:
        """A forward whose assignments a graph would lose is refused.

        What fills an attribute that was None or not there, or only moves a tensor (``moved(new, old)``), is none of those,
        unless it holds a tensor made from an input (``varies(new)``): that is state, not something computed once.

        Raises:
            TraceError: It assigned to an attribute or buffer of one of ``modules``, or drew Python's or NumPy's random numbers.
        """
        for module in modules:
            was = self.attributes[id(module)]
            for name, value in {**module.__dict__, **module._buffers}.items():
                old = was.get(name)
                if name not in _OF_TORCH and (varies(value) if old is None else _differs(value, old, varies, moved)):
                    what = f"the forward of a {type(module).__name__} assigns to its attribute {name!r} or changes it"
                    raise TraceError(f"{what}, which a graph cannot repeat; keep it whole with leaf_modules")
        if self.random_numbers.changed():
            what = "the forward draws random numbers from Python or NumPy, which a graph cannot repeat"
            raise TraceError(f"{what}; keep the module that does it whole with leaf_modules")

    def _swap(self, modules: list[nn.Module]) -> None:
        for module in modules:
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        known = self._standins.get(id(tensor))
                        table[name] = self._stand_in(tensor) if known is None else known  # type: ignore[assignment]
        for module in modules:
            if isinstance(module, nn.RNNBase):
                module.__dict__["_flat_weights"] = [self._standins.get(id(weight), weight) for weight in module._flat_weights]
            state = {**module.__dict__, **module._buffers}
            self.attributes[id(module)] = {
                name: copy.copy(value) if isinstance(value, _CONTAINERS) else value for name, value in state.items()
            }

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.fake:
            new = private.as_parameter(self.fake_of(tensor), tensor)
        else:
            new = tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
        self._standins[id(tensor)] = new
        self.originals[id(new)] = tensor
        return new


def _snapshot(modules: list[nn.Module]) -> list[Callable[[], None]]:
    undo: list[Callable[[], None]] = []
    for module in modules:
        state = module.__dict__
        kept = [(value, value.copy()) for value in state.values() if type(value) in (list, dict, set)]
        kept += [(state[name], state[name].copy()) for name in _TABLES if type(state[name]) not in (dict, set)]
        undo.append(lambda state=state, before=dict(state), kept=kept: _restore(state, before, kept))  # type: ignore[misc]
    return undo


def _forget_results(modules: list[nn.Module]) -> Callable[[], None]:
    """Empties the ``lru_cache`` of every function near the modules that the run has added to: it holds stand-ins."""
    classes = {cls for module in modules for cls in type(module).__mro__}
    spaces = [vars(thing) for thing in [*classes, *{sys.modules[cls.__module__] for cls in classes}, *modules]]
    values = [getattr(value, "__func__", value) for space in spaces for value in space.values()]
    cells = [cell for value in values if isinstance(value, FunctionType) for cell in value.__closure__ or ()]
    values += [cell.cell_contents for cell in cells if cell != CellType()]  # a decorator around the cache
    caches = [value for value in values if isinstance(value, _lru_cache_wrapper)]
    before = [cache.cache_info().misses for cache in caches]

    def undo() -> None:
        for index, cache in enumerate(caches):
            if cache.cache_info().misses != before[index]:
                cache.cache_clear()
                before[index] = 0

    return undo


def _restore(state: dict[str, Any], before: dict[str, Any], kept: list[tuple[Any, Any]]) -> None:
    for container, content in [*kept, (state, before)]:
        container.clear()
        container.extend(content) if isinstance(container, list) else container.update(content)


def _differs(value: Any, was: Any, varies: Callable[[Any], bool], moved: Callable[[Any, Any], bool]) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(was, torch.Tensor):
        return value is not was and not moved(value, was)
    if isinstance(value, dict) and isinstance(was, dict):  # a new entry is a cache's when it is a constant tensor
        news = [new for key, new in value.items() if key not in was]
        kept = all(key in value and not _differs(value[key], old, varies, moved) for key, old in was.items())
        return not kept or any(varies(new) or isinstance(new, (bool, int, float, str)) for new in news)
    if isinstance(value, (list, deque)) and isinstance(was, (list, deque)):
        return len(value) != len(was) or any(_differs(new, old, varies, moved) for new, old in zip(value, was, strict=True))
    if isinstance(value, set) and isinstance(was, set):
        return value != was
    return isinstance(value, (bool, int, float, str)) and value != was


class OtherRandomNumbers:
    """Python's and NumPy's random states now, to compare with and to put back; torch's own are forked."""

    def __init__(self) -> None:
        self.numpy = sys.modules.get("numpy.random")
        self.state = random.getstate()
        self.numpy_state: Any = self.numpy.get_state() if self.numpy else None

    def changed(self) -> bool:
        """Whether numbers have been drawn."""
        if random.getstate() != self.state:
            return True
        return self.numpy is not None and any(map(_unequal, self.numpy.get_state(), self.numpy_state))

    def put_back(self) -> None:
        """As if none had been."""
        random.setstate(self.state)
        if self.numpy:
            self.numpy.set_state(self.numpy_state)


def _unequal(one: Any, other: Any) -> bool:
    return bool(one.tobytes() != other.tobytes() if hasattr(one, "tobytes") else one != other)
