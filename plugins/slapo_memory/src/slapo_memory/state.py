"""State that a forward changes in its modules beside their parameters: a recompute sees what the forward saw.

These are buffers, such as BatchNorm's running statistics, and plain attributes, such as a counter, with the lists, dicts
and sets in them. The recompute gets copies of the tensors, so that they advance once, and autograd may keep the copies.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ._torch_private import no_functions, no_modes
from .randomness import HeldState, generators_in

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)
_WRAPPERS_OWN = frozenset({*nn.Module().__dict__, "_external_params"})
"""Parameters, children and hooks: a wrapper that swaps these in a forward, as sharded data parallelism does, knows why. In
the last, DeepSpeed notes in the forward which other modules' parameters ZeRO has to gather for the recompute as well."""


class StartState:
    """The state of modules, and of all modules below them, as of now.

    Args:
        modules: Where to look.
        generators: Of random numbers, beside those found there.
    """

    def __init__(self, modules: Sequence[nn.Module], generators: Iterable[Any] = ()) -> None:
        self._places: dict[int, _Place] = {}
        self._tensors: dict[int, _TensorCopy] = {}
        self._generators = [*generators]
        with no_modes():
            for module in {below for top in modules for below in top.modules()}:
                self._visit(module.__dict__, _WRAPPERS_OWN)
                self._visit(module._buffers)
        self._drawn = HeldState(self._generators)
        self._modes = [(below, below.training) for top in modules for below in top.modules()]

    def keep_changed(self) -> None:
        """Forget what is as it was; call it after the forward."""
        with no_modes():
            self._drawn.keep_changed()
        self._tensors = {key: tensor for key, tensor in self._tensors.items() if tensor.changed()}
        self._places = {key: place for key, place in self._places.items() if place.changed() or place.holds(self._tensors)}

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run a block with the state of the start; afterwards it is that of before the block."""
        places = self._places.values()
        modes = [(module, module.training) for module, before in self._modes if module.training is not before]
        now = [(place, place.read()) for place in places]
        with no_modes():
            fresh = {key: tensor.copy.clone() for key, tensor in self._tensors.items()}
        for place in places:
            place.write(place.start, fresh)
        for module, other in modes:  # somebody may have called eval() before the backward
            module.training = not other
        try:
            with self._drawn.again():
                yield
        finally:
            for place, content in now:
                place.write(content, {})
            for module, other in modes:
                module.training = other

    def _visit(self, live: Any, hidden: frozenset[str] = frozenset()) -> None:
        if id(live) in self._places:
            return
        place = self._places[id(live)] = _Place(live, hidden)
        for value in _values(place.start):
            if type(value) in _CONTAINERS:
                self._visit(value)
            elif isinstance(value, torch.Tensor) and not value.requires_grad and id(value) not in self._tensors:
                self._tensors[id(value)] = _TensorCopy(value)
            else:
                self._generators += generators_in(value)


class _Place:
    """One container that a forward may change, with its content at the start."""

    def __init__(self, live: Any, hidden: frozenset[str]) -> None:
        self.live, self.hidden = live, hidden
        self.start = self.read()

    def read(self) -> Any:
        if not self.hidden:
            return copy.copy(self.live)
        return {name: value for name, value in self.live.items() if name not in self.hidden}

    def write(self, content: Any, instead: Mapping[int, torch.Tensor]) -> None:
        """Make this the content, with other tensors for those of some ids."""
        if isinstance(self.live, dict):
            kept = {name: value for name, value in self.live.items() if name in self.hidden}
            self.live.clear()
            self.live.update({**kept, **{name: instead.get(id(value), value) for name, value in content.items()}})
            return
        self.live.clear()
        add = self.live.update if isinstance(self.live, set) else self.live.extend
        add([instead.get(id(value), value) for value in content])

    def changed(self) -> bool:
        now = self.read()
        if isinstance(now, set):
            return bool(now != self.start)
        names = isinstance(now, dict) and list(now) != list(self.start)
        return names or list(map(id, _values(now))) != list(map(id, _values(self.start)))

    def holds(self, tensors: Mapping[int, Any]) -> bool:
        return any(id(value) in tensors for value in _values(self.start))


class _TensorCopy:
    """A tensor that a forward may write to in place, and its value at the start."""

    def __init__(self, tensor: torch.Tensor) -> None:
        with no_functions() if type(tensor) is torch.Tensor else nullcontext():  # it would make plain tensors of others
            self.tensor, self.copy, self.version = tensor, tensor.detach().clone(), version_of(tensor)

    def changed(self) -> bool:
        """Return whether the tensor was or may have been written to."""
        return version_of(self.tensor) != self.version or _is_statistic(self.tensor)


def _values(content: Any) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content


def version_of(tensor: torch.Tensor) -> int:
    """Return how often the tensor was written to; inference tensors do not count, nor may a forward with gradients write."""
    return 0 if tensor.is_inference() else tensor._version


def _is_statistic(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may be a mean or a variance: batch norm's kernels write to these without counting a version."""
    return tensor.dim() == 1 and tensor.is_floating_point()
