"""Gathers of stage 3 of ZeRO: when each parameter is gathered, prefetched and freed, as DeepSpeed's coordinator decides."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from .zero_settings import ZeroSettings


class _Use(NamedTuple):
    """Use of a parameter by a module at a step of the recorded order."""

    parameter: nn.Parameter
    step: int


class _Event(NamedTuple):
    """Begin or end of the forward or backward of a module."""

    module: nn.Module
    begins: bool
    is_forward: bool


class _Gather:
    """Gathered parameters on their way, and the buffer that they arrive in together; a single one has no such buffer."""

    def __init__(self, parameters: Sequence[nn.Parameter], buffer: torch.Tensor | None) -> None:
        self.parameters, self.buffer = parameters, buffer
        self.is_complete = buffer is None


class ParameterGathers:
    """Whole parameters that exist at a time, for one micro-batch after the other.

    A gathered parameter has the gathered memory as its data, which a graph that saved it holds for longer.

    The first micro-batch records the order of modules, forward and backward. Until then nothing is prefetched. DeepSpeed keeps
    for ever which parameters it frees after the forward of each module, as it decides that in its first complete order. That
    one is of forwards alone, as ``DeepSpeedEngine`` begins with a forward that finds the labels of the loss.

    Args:
        settings: Settings of ZeRO.
        replicas: Number of data-parallel ranks.
        parameters: All parameters, in order; their own memory stands for that of freed ones.
        gathered: Takes the bytes of each all-gather, and True if the rank goes on computing while it runs.
    """

    def __init__(
        self,
        settings: ZeroSettings,
        replicas: int,
        parameters: Iterable[nn.Parameter],
        gathered: Callable[[int, bool], None],
    ) -> None:
        self._settings, self._replicas, self._gathered = settings, replicas, gathered
        self._parameters = [*parameters]
        self.persistent: list[nn.Parameter] = []
        self._freed_data: dict[int, torch.Tensor] = {}
        total = 0
        for parameter in self._parameters:
            self._freed_data[id(parameter)] = parameter.data
            if parameter.numel() + total <= settings.persistent_total and parameter.numel() <= settings.persistent:
                self.persistent.append(parameter)
                total += parameter.numel()
        self._persistent = {id(each) for each in self.persistent}
        self.whole: dict[int, torch.Tensor | None] = {}
        """Memory of the parameters that are whole, by ``id``."""
        self._gathers: dict[int, _Gather] = {}
        self._events: list[_Event] = []
        self._kept_releases: dict[tuple[int, int], list[nn.Parameter]] = {}
        self._modules: list[nn.Module] = []
        self._is_recorded = False
        self._order: list[_Use] = []
        self._running: dict[int, set[int]] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a micro-batch."""
        for gather in [*self._gathers.values()]:
            self._wait(gather)
            self._free(gather.parameters)
        self._gathers.clear()
        self._queue = deque(self._order)
        self._last_use: dict[int, int] = {}
        self._step = self._num_gathered = 0

    def end_recording(self) -> None:
        """Take the recorded micro-batch for the order of each one, and free all parameters but the persistent ones."""
        first = next((index for index, each in enumerate(self._events) if not each.is_forward), len(self._events))
        self._is_recorded = True
        for events in (self._events[:first], self._events):
            self._modules = [each.module for each in events if each.begins]
            self._order = [_Use(each, step) for step, module in enumerate(self._modules) for each in _own(module)]
            self.release_all()
            self.gather_persistent()
            self.begin()
            for each in events if len(events) == first else ():
                (self.fetch if each.begins else self.release)(each.module, True)
        self.release_all()
        self.gather_persistent()
        self.begin()

    def fetch(self, module: nn.Module, is_forward: bool) -> None:
        """Gather the parameters of a module that begins its forward or backward, and prefetch."""
        own = _own(module)
        if not self._is_recorded:
            self._events.append(_Event(module, True, is_forward))
        self._gather(own, is_prefetch=False)
        for parameter in own:
            self._running.setdefault(id(parameter), set()).add(id(module))
            if (gather := self._gathers.pop(id(parameter), None)) is not None:
                self._wait(gather)
        if self._is_recorded:
            self._skip(own)
            self._prefetch()
        self._step += 1

    def _skip(self, own: Sequence[nn.Parameter]) -> None:
        expected = {id(each) for each in own if self._last_use.get(id(each), -1) < self._step}
        seen: set[int] = set()
        while self._queue and len(seen) < len(expected):
            use = self._queue.popleft()
            self._last_use[id(use.parameter)] = use.step
            seen.add(id(use.parameter))

    def _prefetch(self) -> None:
        limit = min(self._settings.max_live - self._num_gathered, self._settings.prefetch_bucket)
        found: dict[int, nn.Parameter] = {}
        count = 0
        while self._queue and count < limit:
            use = self._queue.popleft()
            key = id(use.parameter)
            self._last_use[key] = max(self._last_use.get(key, -1), use.step)
            if key not in self.whole and key not in found:
                found[key] = use.parameter
                count += use.parameter.numel()
        self._gather([*found.values()], is_prefetch=True)

    def _gather(self, parameters: Iterable[nn.Parameter], is_prefetch: bool) -> None:
        wanted = [each for each in parameters if id(each) not in self.whole]
        if not wanted:
            return
        self._num_gathered += sum(each.numel() for each in wanted)
        sizes = [partition_size(each, self._replicas) * self._replicas for each in wanted]
        by_type: Counter[torch.dtype] = Counter()
        for parameter, size in zip(wanted, sizes, strict=True):
            by_type[parameter.dtype] += size
        for dtype, size in by_type.items():
            self._gathered(size * dtype.itemsize, is_prefetch)
        buffer = None
        if len(wanted) > 1 and self._replicas > 1:
            buffer = wanted[0].new_empty(sum(sizes))
        for parameter, size in zip(wanted, sizes, strict=True):
            alone = buffer is None and self._replicas > 1
            self._set_whole(parameter, parameter.new_empty(size) if alone else None)
        gather = _Gather(wanted, buffer)
        self._gathers.update((id(each), gather) for each in wanted)

    def _wait(self, gather: _Gather) -> None:
        if not gather.is_complete:
            gather.is_complete = True
            for each in gather.parameters:
                self._set_whole(each, torch.empty_like(each))

    def _set_whole(self, parameter: nn.Parameter, memory: torch.Tensor | None) -> None:
        self.whole[id(parameter)] = memory
        if memory is not None:
            parameter.data = memory.view(-1)[: parameter.numel()].view(parameter.shape)

    def release(self, module: nn.Module, is_forward: bool) -> None:
        """Free the parameters of a module that has run, unless they are used soon again."""
        own, key = _own(module), (id(module), self._step)
        free = own
        if not self._is_recorded:
            self._events.append(_Event(module, False, is_forward))
        elif (kept := self._kept_releases.get(key)) is not None:
            free = kept
        else:
            free = self._kept_releases[key] = self._not_reused(own)
        for each in own:
            self._running.get(id(each), set()).discard(id(module))
        self._free([each for each in free if not self._running.get(id(each))])

    def _not_reused(self, own: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        free = {id(each): each for each in own if id(each) not in self._persistent}
        free = {key: each for key, each in free.items() if self._last_use.get(key, -1) <= self._step}
        passed = 0
        for module in self._modules[self._step :]:
            if passed >= self._settings.max_reuse or not free:
                break
            for parameter in _own(module):
                free.pop(id(parameter), None)
                passed += parameter.numel()
        return [*free.values()]

    def _free(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if id(parameter) in self.whole and id(parameter) not in self._gathers:
                self._drop(parameter)
                self._num_gathered -= parameter.numel()

    def _drop(self, parameter: nn.Parameter) -> None:
        del self.whole[id(parameter)]
        parameter.data = self._freed_data[id(parameter)]

    def release_leftovers(self, modules: Iterable[nn.Module]) -> None:
        """Free what modules hold whose backward never ended, as none of their inputs has a gradient."""
        for module in modules:
            own = _own(module)
            for parameter in own:
                self._running.get(id(parameter), set()).discard(id(module))
            self._free([each for each in own if id(each) not in self._persistent and not self._running.get(id(each))])

    def release_all(self) -> None:
        """Free all parameters, before the optimizer steps."""
        for parameter in self._parameters:
            if id(parameter) in self.whole:
                self._drop(parameter)
        self._gathers.clear()
        self._running.clear()

    def gather_persistent(self) -> None:
        """Gather the parameters that stay whole, after the optimizer has stepped."""
        for parameter in self.persistent:
            size = partition_size(parameter, self._replicas) * self._replicas
            self._gathered(size * parameter.element_size(), False)
            self._set_whole(parameter, parameter.new_empty(size) if self._replicas > 1 else None)


def partition_size(parameter: torch.Tensor, replicas: int) -> int:
    """Return the number of elements of a parameter that each replica holds, padding included."""
    return -(-parameter.numel() // replicas)


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [*module.parameters(recurse=False)]
