"""State of modules that a forward changes, other than parameters; a recomputation restores it.

It consists of buffers, such as BatchNorm's running statistics, and plain attributes, such as a counter, with the lists, dicts
and sets in them. The recomputation gets copies of the tensors, so the originals advance once, and autograd may save the copies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from ._torch_private import no_functions, no_modes
from .random_state import GeneratorState, generators_in
from .value_kinds import ATOMS, Kind, kind_of

_WRAPPERS_OWN = frozenset({*nn.Module().__dict__, "_external_params"})
"""Attributes that are not restored. Wrappers such as FSDP replace parameters, children and hooks in a forward on purpose, and
DeepSpeed records in ``_external_params`` which other parameters ZeRO must gather, also for the recomputation."""


class ForwardState:
    """The present state of modules and of all modules below them, and of further random generators."""

    def __init__(self, modules: Sequence[nn.Module], generators: Iterable[Any] = ()) -> None:
        self._generators = [*generators]
        self._modules = _with_below(modules)
        self._modes = [module.training for module in self._modules]
        self._attributes: list[tuple[dict[str, Any], _Layout, tuple[Any, ...]]] = []
        self._empty: list[Any] = []  # buffers of modules without any
        self._containers: dict[int, _Container] = {}
        self._places: list[_Container | _ModuleAttributes] = []  # after the forward: the containers to restore
        self._tensors: dict[int, _TensorCopy] = {}
        found: dict[int, torch.Tensor] = {}
        for module in self._modules:
            live = module.__dict__
            layout = _layout_of(tuple(live))
            values = layout.pick(live)
            self._attributes.append((live, layout, values))
            if not ATOMS.issuperset(map(type, values)):
                self._visit_values(values, found)
            if buffers := module._buffers:
                self._visit(buffers, found)
            else:
                self._empty.append(buffers)
        for live, _, _ in self._attributes if self._containers else ():  # a module's __dict__ can also be in a container
            self._containers.pop(id(live), None)
        with no_modes() if found or self._generators else nullcontext():
            self._tensors = {key: _TensorCopy(tensor) for key, tensor in found.items()}
            self._drawn = GeneratorState(self._generators)

    def keep_changed(self) -> None:
        """Drop the state that did not change; call it after the forward."""
        with no_modes() if self._tensors or self._generators else nullcontext():
            self._drawn.keep_changed()
            self._tensors = {key: tensor for key, tensor in self._tensors.items() if tensor.has_changed()}
        kept = self._tensors
        places = self._places
        places += [place for place in self._containers.values() if place.has_changed() or place.holds(kept)]
        places += [_Container(live, type(live)()) for live in self._empty if live]
        for live, layout, values in self._attributes:
            if not layout.has(live, values) or (kept and not kept.keys().isdisjoint(map(id, values))):
                places.append(_ModuleAttributes(live, layout, values))
        self._attributes, self._empty, self._containers = [], [], {}

    @contextmanager
    def restore_for_block(self) -> Iterator[None]:
        """Restore the state for the block; afterwards put back the state from before the block."""
        places = self._places
        pairs = zip(self._modules, self._modes, strict=True)
        modes = [(module, module.training) for module, before in pairs if module.training is not before]
        now = [(place, place.read()) for place in places]
        with no_modes() if self._tensors else nullcontext():
            fresh = {key: tensor.copy.clone() for key, tensor in self._tensors.items()}
        for place in places:
            place.write(place.start(), fresh)
        for module, other in modes:  # the user may have called eval() before the backward
            module.training = not other
        try:
            with self._drawn.restore_for_block():
                yield
        finally:
            for place, content in now:
                place.write(content, {})
            for module, other in modes:
                module.training = other

    def _visit(self, live: Any, found: dict[int, torch.Tensor]) -> None:
        if id(live) not in self._containers:
            place = self._containers[id(live)] = _Container(live)
            self._visit_values(place.values, found)

    def _visit_values(self, values: Iterable[Any], found: dict[int, torch.Tensor]) -> None:
        """Visit the containers among values, and record the tensors and generators."""
        for value in values:
            kind = kind_of(type(value))
            if kind is Kind.CONTAINER:
                self._visit(value, found)
            elif kind is Kind.TENSOR:
                if not value.requires_grad:
                    found.setdefault(id(value), value)
            elif kind is Kind.GENERATOR or (kind is Kind.NESTED and not ATOMS.issuperset(map(type, value))):
                self._generators += generators_in(value)


def _with_below(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules and all below them, each once; ``nn.Module.modules`` takes longer."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [*modules]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting += module._modules.values()
    return [*found.values()]


class _Container:
    """A list, dict, set or deque that a forward may change.

    Args:
        start: Its content at the start; default: the present content.

    Attributes:
        values: Its values at the start.
    """

    def __init__(self, live: Any, start: Any = None) -> None:
        self.live = live
        self._start = self.read() if start is None else start
        self.values = _values(self._start)

    def start(self) -> Any:
        """Return the content at the start."""
        return self._start

    def read(self) -> Any:
        return copy.copy(self.live)

    def write(self, content: Any, instead: Mapping[int, torch.Tensor]) -> None:
        """Set the content, with the tensors of some ids replaced."""
        self.live.clear()
        if isinstance(self.live, dict):
            self.live.update({name: instead.get(id(value), value) for name, value in content.items()})
            return
        add = self.live.update if isinstance(self.live, set) else self.live.extend
        add([instead.get(id(value), value) for value in content])

    def has_changed(self) -> bool:
        """Return whether the content differs from the start."""
        live, start = self.live, self._start
        if len(live) != len(start):
            return True
        if isinstance(live, set):
            return bool(live != start)
        names = isinstance(live, dict) and list(live) != list(start)
        return names or not all(map(is_, _values(live), self.values))

    def holds(self, tensors: Mapping[int, Any]) -> bool:
        """Return whether one of the tensors, by id, was in it at the start."""
        return bool(tensors) and not tensors.keys().isdisjoint(map(id, self.values))


class _ModuleAttributes:
    """The ``__dict__`` of a module, without the names in ``_WRAPPERS_OWN``."""

    def __init__(self, live: dict[str, Any], layout: _Layout, values: tuple[Any, ...]) -> None:
        self.live, self.values, self._names = live, values, layout.names

    def start(self) -> dict[str, Any]:
        return dict(zip(self._names, self.values, strict=True))

    def read(self) -> dict[str, Any]:
        return {name: value for name, value in self.live.items() if name not in _WRAPPERS_OWN}

    def write(self, content: Any, instead: Mapping[int, torch.Tensor]) -> None:
        kept = {name: value for name, value in self.live.items() if name in _WRAPPERS_OWN}
        self.live.clear()
        self.live.update({**kept, **{name: instead.get(id(value), value) for name, value in content.items()}})


class _Layout:
    """Names of the attributes of a module.

    Attributes:
        names: Those that wrappers do not use, in order.
        pick: Returns the values of these from the ``__dict__``, as a tuple.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = tuple(name for name in names if name not in _WRAPPERS_OWN)
        self.pick: Callable[[dict[str, Any]], tuple[Any, ...]] = (
            itemgetter(*self.names) if len(self.names) > 1 else self._pick_at_most_one
        )

    def _pick_at_most_one(self, live: dict[str, Any]) -> tuple[Any, ...]:
        """Pick at most one value; of one name, itemgetter returns no tuple."""
        return (live[self.names[0]],) if self.names else ()

    def has(self, live: dict[str, Any], values: tuple[Any, ...]) -> bool:
        """Return whether a ``__dict__`` has these names, with these objects as values."""
        now = _layout_of(tuple(live))
        return (now is self or now.names == self.names) and all(map(is_, self.pick(live), values))


_layout_of = lru_cache(maxsize=4096)(_Layout)


class _TensorCopy:
    """A tensor that a forward may write to in place, and its value at the start."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # not for tensor subclasses, which it would turn into plain tensors
        with no_functions() if type(tensor) is torch.Tensor else nullcontext():
            self.tensor, self.copy, self.version = tensor, tensor.detach().clone(), version_of(tensor)

    def has_changed(self) -> bool:
        """Return whether the tensor was or may have been written to."""
        # batch norm's kernels write to means and variances without counting a version
        may_be_statistic = self.tensor.dim() == 1 and self.tensor.is_floating_point()
        return may_be_statistic or version_of(self.tensor) != self.version


def _values(content: Any) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content


def version_of(tensor: torch.Tensor) -> int:
    """Return the tensor's version counter; inference tensors have none, and a forward with gradients cannot write to them."""
    return 0 if tensor.is_inference() else tensor._version
