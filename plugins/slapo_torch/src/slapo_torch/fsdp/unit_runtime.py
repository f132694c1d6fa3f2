"""Gathers and reductions of units as they run, in the same order on every replica, for models without pipeline stages."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from slapo_core import BuildError

from ..gradients._torch_private import no_functions
from .unit import REMEDY, Unit

if TYPE_CHECKING:
    from .fake_unit import FakeUnit


class UnitRuntime:
    """Gathers each unit before its forward and before its backward, and reduces it after its backward.

    All replicas send the same messages: a replica gathers and reduces also units that it does not run, and the rest after an
    error. So a unit may run once in a forward only, in the order of the model.

    Args:
        units: Units in the order of the model.
        is_observed: True if first-run checks read all parameters in the first forward; it then gathers all units.

    Attributes:
        gathers_all: True if the last forward had all units gathered.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit | FakeUnit], is_observed: bool) -> None:
        self._units = list(units)
        self.gathers_all = self._is_observed = is_observed
        self._is_active = False
        self._is_backward = False
        self._next_forward = 0  # index of the next unit to gather for its forward
        self._next_backward = -1  # index of the next unit to gather for its backward
        self._in_backward: int | None = None  # index of the unit that is gathered for its backward
        self._hooks: list[RemovableHandle] = []
        for index, unit in enumerate(self._units):
            module = root.get_submodule(unit.path)
            before, behind = partial(self._pre_forward, index), partial(self._post_forward, index)
            if "torch._dynamo" in sys.modules:  # its import takes seconds
                before, behind = map(torch.compiler.disable, (before, behind))
            before.of_engine = behind.of_engine = True  # type: ignore[attr-defined]  # traces leave these hooks out
            self._hooks.append(module.register_forward_pre_hook(before, prepend=True))
            self._hooks.append(module.register_forward_hook(behind, with_kwargs=True))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def microbatch(self, training: bool) -> Iterator[None]:
        """Context of one forward and, in training, one backward. Collective over the replicas, also after an error."""
        self._is_active, self._is_backward = True, False
        self._next_forward, self._next_backward, self._in_backward = 0, len(self._units) - 1, None
        self.gathers_all, self._is_observed = self._is_observed, False
        for unit in self._units if self.gathers_all else ():
            unit.gather()
        try:
            yield
        finally:
            self._end_forward()
            if training:
                self._advance_backward(-1)
            self._is_active = False
        for unit in self._units:
            if any(each.whole is not None and each.whole.grad is not None for each in unit.members):
                raise BuildError(f"a parameter of {unit.path!r} got a gradient after the backward had left that unit; {REMEDY}")

    def _pre_forward(self, index: int, module: nn.Module, args: Any) -> None:
        path = self._units[index].path
        if not self._is_active:
            raise BuildError(
                f"the parameters of {path!r} are sharded over replicas; run the model by train_batch or eval_batch"
            )
        if index < self._next_forward and index != self._in_backward:
            raise BuildError(f"the unit {path!r} runs again, or behind one that follows it in the model; {REMEDY}")
        if not self._is_backward:
            with no_functions():
                self._advance_forward(index)

    def _post_forward(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._is_backward:  # recomputation within the backward
            return output
        unit = self._units[index]
        if torch.is_grad_enabled():
            # an in-place operation on a view would bypass the hook
            output = tree_map_only(torch.Tensor, lambda each: each.clone() if each._is_view() else each, output)
            found = [tensor for tensor in _tensors(output) if tensor.requires_grad]
            if unit.is_trained and not found:
                raise BuildError(f"the unit {unit.path!r} returns no tensor with a gradient; {REMEDY}")
            given = {id(tensor) for tensor in _tensors([args, kwargs])}  # outputs that are inputs belong to earlier units
            for tensor in found:
                if id(tensor) not in given:
                    tensor.register_hook(partial(self._pre_backward, index))  # type: ignore[no-untyped-call]
        if not self.gathers_all:
            with no_functions():
                unit.free("freed")
        return output

    def _pre_backward(self, index: int, gradient: torch.Tensor) -> None:
        if index != self._in_backward:
            if index > self._next_backward:
                raise BuildError(f"the backward comes back to the unit {self._units[index].path!r}; {REMEDY}")
            self._advance_backward(index)

    def _advance_forward(self, index: int) -> None:
        while self._next_forward <= index:
            self._next_forward += 1
            if not self.gathers_all:
                for unit in self._units[max(self._next_forward - 2, 0) : self._next_forward - 1]:
                    unit.free("freed")
                self._units[self._next_forward - 1].gather()
                for unit in self._units[self._next_forward : self._next_forward + 1]:
                    unit.begin_gather()

    def _end_forward(self) -> None:
        if not self._is_backward:
            self._advance_forward(len(self._units) - 1)
            for unit in self._units if self.gathers_all else self._units[-1:]:
                unit.free("freed")
            self._is_backward = True

    def _advance_backward(self, index: int) -> None:
        """Reduce the units after ``index``, and gather that unit; -1 reduces all units."""
        self._end_forward()
        while self._in_backward is None or self._in_backward != index:
            if self._in_backward is not None:
                self._units[self._in_backward].reduce("freed")
                self._in_backward = None
            if self._next_backward < max(index, 0):
                return
            self._units[self._next_backward].gather()
            self._in_backward, self._next_backward = self._next_backward, self._next_backward - 1
            if self._next_backward >= 0:
                self._units[self._next_backward].begin_gather()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in nested containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
