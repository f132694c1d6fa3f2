"""Runs of a forward that leave the model unchanged: on fake tensors, or on real parameters and copies of buffers."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from types import CellType, FunctionType, MethodType
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from slapo_core import TraceError

from ..nodes import _torch_private as private
from ..nodes.nested_values import Snapshot, contents, fingerprint, restore_contents, tensors_in


class OperatorObserver(Protocol):
    """Dispatch mode whose work is done by ``run``."""

    def run(self, call: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator by calling ``call(args, kwargs)``, and return its result."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: Any) -> Any: ...


_TABLES = (dict, list)
_METHODS = (staticmethod, classmethod, MethodType)


class Sandbox:
    """Substitutes for the tensors of a model.

    Args:
        root: The model; its weights may be on the meta device if ``fake``.
        inputs: Arguments of its forward; they determine the device of the substitutes.
        fake: True for fake tensors, False for real parameters and cloned buffers.
        keeps_values: With ``fake``: the inputs are real, and so is everything computed from them alone.
        most_values: Number of elements from which that is fake; None for any number.
        answers: True to answer queries for values that are computed from the inputs alone, in the whole forward.
        knows_constants: True to tell tensors from before that no module holds from new ones. The search for them may take
            longer than a trace; without it they count as new, and ``met_constant`` tells that one may have been met.
        copies: Without ``fake``: parameters are copies, too, so that gradients do not reach the model's own. Weights on the
            meta device get small random numbers.
    """

    open_count: ClassVar[int] = 0
    """Number of open sandboxes in this process."""

    def __init__(
        self,
        root: nn.Module,
        inputs: Any,
        *,
        fake: bool,
        keeps_values: bool = False,
        most_values: int | None = None,
        answers: bool = False,
        knows_constants: bool = True,
        copies: bool = False,
    ) -> None:
        self.root, self.fake, self.answers, self.copies = root, fake, answers, copies
        self.mode = private.FakeMode(allow_non_fake_inputs=True)
        self.mode.keeps_values, self.mode.most_values = keeps_values, most_values
        self.watch = self.mode if fake else private.Watch()  # type: ignore[no-untyped-call]
        self.originals: dict[int, torch.Tensor] = {}
        """Substitute (by id) to the model's own tensor."""
        self.knows_constants, self.met_constant = knows_constants, False
        objects = [] if not knows_constants or (fake and not answers) else gc.get_objects()
        self.before = {id(value): value for value in objects if issubclass(type(value), torch.Tensor)}
        self.state: dict[int, Snapshot] = {}
        """Module (by id) to its attributes before the forward runs."""
        self._substitutes: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._swapped: list[tuple[dict[str, Any], str, Any]] = []
        devices = (tensor.device for tensor in tensors_in(inputs) if not tensor.is_meta)
        self.device = next(devices, torch.device("cpu"))
        self._is_empty = any(tensor.is_meta for tensor in [*root.parameters(), *root.buffers()])

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor like this one, without autograd history."""
        return private.fake_like(self.mode, tensor, self.device if tensor.is_meta else None)

    def substitute_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor like this one, or one with its values or random ones; without autograd history."""
        if self.fake:
            return self.fake_of(tensor)
        return _random_like(tensor, self.device) if tensor.is_meta else tensor.detach().clone()

    def enter_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a substitute for an input, so that a change in place does not affect the caller's tensor."""
        if tensor.is_nested and tensor.layout is not torch.jagged:
            raise TraceError("it is given a nested tensor, which has no shape that a graph could be made for")
        if self.fake and not self.mode.keeps_values:
            return self.fake_of(tensor)
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    def attributes_before(self, module: nn.Module) -> dict[str, Any]:
        """Return the attributes of a module before the forward ran; empty for a module that was not there."""
        return self.state[id(module)].parts[()][1] if id(module) in self.state else {}

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor was created after the sandbox."""
        if (self.fake and not self.answers) or id(tensor) in self.before:
            return False
        if not self.knows_constants and self._is_in_attribute(tensor):
            return False
        self.met_constant |= not self.knows_constants
        return True

    def _is_in_attribute(self, tensor: torch.Tensor) -> bool:
        """Return True if a module held the tensor in an attribute before the forward ran."""
        contents = (parts for snapshot in self.state.values() for _, parts in snapshot.parts.values())
        return any(tensor is value for parts in contents for value in parts.values())

    @contextmanager
    def open(self, grad: bool) -> Iterator[None]:
        """Put the substitutes into the model, with gradients on or off, and restore model and random state afterwards."""
        modules = list(self.root.modules())
        self.random_numbers = PythonRandomState()
        self.forget_results = _cache_restorer(modules)
        devices = [] if self.fake or self.device.type != "cuda" else [self.device]
        Sandbox.open_count += 1
        try:
            with (
                torch.random.fork_rng(devices),
                torch.inference_mode(False),
                torch.set_grad_enabled(grad),
                private.without_fake_tensor_logs(),
            ):
                self._swap(modules)
                with self.watch:
                    yield
        finally:
            Sandbox.open_count -= 1
            for snapshot in self.state.values():
                snapshot.restore()
            for table, name, value in self._swapped:
                table[name] = value
            self.random_numbers.restore()
            self.forget_results()

    @contextmanager
    def observed_by(self, observer: OperatorObserver) -> Iterator[None]:
        """Let an observer run the operators of a ``with`` block; the sandbox is open."""
        if not self.fake:
            with observer:
                yield
            return
        before, self.mode.observer = self.mode.observer, observer.run
        try:
            yield
        finally:
            self.mode.observer = before

    def keep_schedule_hooks(self) -> None:
        """Give the substitutes the tensor hooks that steps of a schedule have put on parameters; the sandbox is open.

        Hooks of users see no substitutes: they may keep what they are given.
        """
        for new in self._substitutes.values():
            own = self.originals[id(new)]
            for hook in (own._backward_hooks or {}).values() if new.requires_grad else ():
                if getattr(hook, "of_schedule", False):
                    new.register_hook(hook)  # type: ignore[no-untyped-call]

    def changed_tensors(self) -> set[int]:
        """Return the ids of the substitutes that the forward has changed in place."""
        return {id(tensor) for tensor in self._substitutes.values() if private.version(tensor) != self._versions[id(tensor)]}

    def _swap(self, modules: list[nn.Module]) -> None:
        for module in modules:
            for table in (vars(module)["_parameters"], vars(module)["_buffers"]):
                for name, tensor in table.items():
                    if tensor is not None:
                        self._swapped.append((table, name, tensor))
                        table[name] = self._substitute(tensor)
        seen: set[int] = set()
        for module in modules:
            self.state[id(module)] = Snapshot(module.__dict__, seen)

    def _substitute(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._substitutes:
            return self._substitutes[id(tensor)]
        if self.fake:
            device = self.device if self._is_empty else None  # buffers of a meta model go to the same device as its weights
            new = private.as_parameter(private.fake_like(self.mode, tensor, device), tensor)
        elif self.copies:
            new = private.as_parameter(self.substitute_of(tensor).requires_grad_(tensor.requires_grad), tensor)
        else:
            new = tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
        self._substitutes[id(tensor)] = new
        self.originals[id(new)], self._versions[id(new)] = tensor, private.version(new)
        return new


def _random_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor like one on the meta device: random matrices that keep the size of values, and ones elsewhere."""
    found = torch.ones_like(tensor, device=device, requires_grad=False)
    if tensor.dim() > 1 and (tensor.is_floating_point() or tensor.is_complex()):
        found.normal_(std=tensor.shape[-1] ** -0.5)
    return found


def _cache_restorer(modules: list[nn.Module]) -> Callable[[], None]:
    """Return a function that clears each ``lru_cache`` near the modules that the run added to, and restores dicts and lists."""
    classes = {cls for module in modules for cls in type(module).__mro__}
    # code run by exec has no module
    near = [*map(vars, {*classes, *(sys.modules.get(cls.__module__, cls) for cls in classes)})]
    hooks = [hook for module in modules for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())]
    functions = [*(value for space in map(vars, [*classes, *modules]) for value in space.values()), *hooks]
    near += {id(value.__globals__): value.__globals__ for value in functions if isinstance(value, FunctionType)}.values()
    values = [value for space in [*near, *map(vars, modules)] for value in space.values()]
    values = [value.__func__ if isinstance(value, _METHODS) else value for value in values]
    cells = [cell for value in [*values, *hooks] if isinstance(value, FunctionType) for cell in value.__closure__ or ()]
    inner = [cell.cell_contents for cell in cells if cell != CellType()]  # e.g. of a decorator around the cache
    tables = [value for space in near for name, value in space.items() if type(value) in _TABLES and name[:2] != "__"]
    tables += [value for value in inner if type(value) in _TABLES]
    tables += [part for table in tables for part in (table if type(table) is list else table.values()) if type(part) in _TABLES]
    former = [(table, contents(table) or {}) for table in tables if table is not sys.modules]
    caches = [value for value in [*values, *inner] if isinstance(value, _lru_cache_wrapper)]
    before = [cache.cache_info().misses for cache in caches]

    def undo() -> None:
        restore_contents(former)
        for index, cache in enumerate(caches):
            if cache.cache_info().misses != before[index]:
                cache.cache_clear()
                before[index] = 0

    return undo


class PythonRandomState:
    """Present random states of Python and NumPy, for comparison and restoration. Torch's own are forked."""

    def __init__(self) -> None:
        self.numpy = sys.modules.get("numpy.random")
        self.state = random.getstate()
        self.numpy_state: Any = self.numpy.get_state() if self.numpy else None

    def has_changed(self) -> bool:
        numpy_state = self.numpy.get_state() if self.numpy else None
        return random.getstate() != self.state or fingerprint(numpy_state) != fingerprint(self.numpy_state)

    def restore(self) -> None:
        random.setstate(self.state)
        if self.numpy:
            self.numpy.set_state(self.numpy_state)
