"""Restoration of a model to its exact former state, after a failed step and for ``undo``.

A transaction keeps references, never copies of values. Primitives report changes that it cannot observe with ``on_undo``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from operator import eq, is_
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from ..modules.parameters import ParameterFacts
from ..reporting.errors import SlapoError

_CONTAINERS = {dict, OrderedDict, list, set}
_ABSENT, _UNCHANGED = object(), object()


class Transaction:
    """The undo actions of one step, oldest first.

    Example:
        >>> linear, transaction = nn.Linear(2, 2), Transaction()
        >>> transaction.touch(linear)
        >>> linear.bias, linear.training = None, False
        >>> transaction.rollback()
        >>> linear.bias is None, linear.training
        (False, True)
    """

    def __init__(self) -> None:
        self._inverses: list[Callable[[], None]] = []
        self._seen: set[int] = set()

    def on_undo(self, inverse: Callable[[], None]) -> None:
        """Add an undo action. The newest action runs first."""
        self._inverses.append(inverse)

    def absorb(self, inner: Transaction) -> None:
        """Take over the undo actions of a nested step."""
        self._inverses += [it for it in inner._inverses if not (isinstance(it, Snapshot) and _key(it.subject) in self._seen)]
        self._seen |= inner._seen

    def touch(self, module: nn.Module) -> None:
        """Take a snapshot of one module without its children: attributes, parameters, buffers, children's names, hooks."""
        if _key(module) in self._seen:
            return
        self._seen.add(_key(module))
        for table in (module._parameters, module._buffers):
            for tensor in table.values():
                if tensor is not None and id(tensor) not in self._seen:
                    self._seen.add(id(tensor))
                    self.on_undo(_TensorSnapshot(tensor))
        self.on_undo(_ModuleSnapshot(module))

    def touch_tree(self, root: nn.Module) -> None:
        """Take a snapshot of a module with all modules inside, including the graphs of traced ones."""
        for module in root.modules():
            self.touch(module)
            if isinstance(module, fx.GraphModule):
                self._touch_graph(module)

    def undo_actions(self) -> list[Callable[[], None]]:
        """Return the actions that undo the finished step.

        Snapshots are reduced to the parts that the step changed, so that later changes by others are not undone.
        """
        return [it for it in self._inverses if not isinstance(it, Snapshot) or it.drop_unchanged()]

    def wrote_in_place(self) -> bool:
        """Return True if the step changed values of a parameter or buffer in place, which cannot be undone."""
        return any(isinstance(it, _TensorSnapshot) and it.was_written() for it in self._inverses)

    def rollback(self) -> None:
        """Undo everything, newest first.

        Raises:
            SlapoError: the step wrote into a parameter in place; everything else is undone.
        """
        written = self.wrote_in_place()
        while self._inverses:
            self._inverses.pop()()
        if written:
            raise SlapoError("a primitive wrote into a parameter in place, which cannot be undone; use a new tensor")

    def _touch_graph(self, module: fx.GraphModule) -> None:
        graph, saved = module.graph, fx.Graph()
        saved.output(saved.graph_copy(graph, {})).name = graph.output_node().name

        def restore() -> None:  # in the same graph object, which the snapshot of the module refers to
            for node in reversed(list(graph.nodes)):
                graph.erase_node(node)
            copies: dict[fx.Node, fx.Node] = {}
            copies[saved.output_node()] = graph.output(graph.graph_copy(saved, copies))
            for node, copied in copies.items():
                copied.name = node.name
            getattr(module, "_slapo_recompile", module.recompile)()

        self.on_undo(restore)


def _key(subject: Any) -> int:
    """Return a key that is equal for modules that share their attribute dict."""
    return id(vars(subject)) if isinstance(subject, nn.Module) else id(subject)


class Snapshot(ABC):
    """Former state of one object.

    A call restores the parts that differ. After ``drop_unchanged``, these are the parts that differed at that time.
    """

    def __init__(self, subject: Any) -> None:
        self.subject, self.is_reduced = subject, False

    def __call__(self) -> None:
        if self.is_reduced or self.drop_unchanged():
            self.restore()

    @abstractmethod
    def drop_unchanged(self) -> bool:
        """Drop the parts that are unchanged, and return True if any are left."""

    @abstractmethod
    def restore(self) -> None:
        """Restore the parts that were not dropped."""


class _ModuleSnapshot(Snapshot):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.cls: type | None = type(module)
        self.attributes = module.__dict__.copy()
        containers = [value for value in self.attributes.values() if type(value) in _CONTAINERS]
        self.containers = [(value, value.copy()) for value in containers if value]
        self.empty = [value for value in containers if not value]

    def drop_unchanged(self) -> bool:
        self.is_reduced = True
        self.cls = None if type(self.subject) is self.cls else self.cls
        self.attributes = _former_items(self.subject.__dict__, self.attributes)
        pairs = [*self.containers, *((live, {}) for live in self.empty if live)]
        changed = ((live, former) for live, saved in pairs if (former := _former_contents(live, saved)) is not None)
        self.changed = tuple(chain.from_iterable(changed))  # one long-lived object instead of many
        del self.containers, self.empty
        return bool(self.cls or self.attributes or self.changed)

    def restore(self) -> None:
        if self.cls:
            self.subject.__class__ = self.cls
        _restore_items(self.subject.__dict__, self.attributes)
        # in place, since others refer to the live container, e.g. hook handles
        for live, former in zip(self.changed[::2], self.changed[1::2], strict=True):
            if isinstance(live, dict):
                _restore_items(live, former)
            elif isinstance(live, set):
                live.symmetric_difference_update(former)
            else:
                live[:] = former


class _TensorSnapshot(Snapshot):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.attributes = tensor.__dict__.copy()
        self.facts = [(of, of.names, of.spec, set(of.tags)) for of in self.attributes.values() if type(of) is ParameterFacts]
        self.state: dict[str, Any] = {"requires_grad": tensor.requires_grad, "grad": tensor.grad}
        # a lazy parameter has no data yet, an inference tensor no version
        self.data = None if is_lazy(tensor) else tensor.detach()
        self.version = None if self.data is None or tensor.is_inference() else tensor._version

    def was_written(self) -> bool:
        """Return True if the step changed values in place."""
        known = self.version is not None and not self.is_reduced
        return known and self.subject._version != self.version and not self._has_other_data()

    def drop_unchanged(self) -> bool:
        self.is_reduced = True
        self.data = self.data if self._has_other_data() else None
        self.state = {name: value for name, value in self.state.items() if getattr(self.subject, name) is not value}
        self.attributes = _former_items(self.subject.__dict__, self.attributes)
        self.facts = [known for known in self.facts if (known[0].names, known[0].spec, known[0].tags) != known[1:]]
        return bool(self.data is not None or self.state or self.attributes or self.facts)

    def restore(self) -> None:
        if self.data is not None:
            self.subject.data = self.data
        for name, value in self.state.items():
            setattr(self.subject, name, value)
        _restore_items(self.subject.__dict__, self.attributes)
        for live, names, spec, tags in self.facts:
            live.names, live.spec, live.tags = names, spec, tags

    def _has_other_data(self) -> bool:
        now, data = self.subject, self.data
        if data is None:
            return False
        return (now.data_ptr(), now.shape, now.dtype, now.device) != (data.data_ptr(), data.shape, data.dtype, data.device)


def _former_items(now: dict[Any, Any], before: dict[Any, Any]) -> dict[Any, Any]:
    """Return the former values of changed keys, and ``_ABSENT`` for new keys; empty if nothing changed.

    If the order of keys changed, all other keys are included as ``_UNCHANGED``.
    """
    same_names = len(now) == len(before) and all(map(is_, now, before))
    if same_names and all(map(is_, now.values(), before.values())):
        return {}
    former = {name: value for name, value in before.items() if now.get(name, _ABSENT) is not value}
    if not same_names and not all(map(eq, now, before)) and [*before] != [name for name in now if name in before]:
        former = {name: former.get(name, _UNCHANGED) for name in before}
    return former if same_names else {**former, **{name: _ABSENT for name in now if name not in before}}


def _restore_items(live: dict[Any, Any], former: dict[Any, Any]) -> None:
    """Undo the changes of a step in a dict. Later changes by others stay; keys that others added come last."""
    changed = {name: value for name, value in former.items() if value is not _UNCHANGED}
    both = {**(former if len(changed) < len(former) else {}), **live, **changed}
    live.clear()
    live.update((name, value) for name, value in both.items() if value is not _ABSENT and value is not _UNCHANGED)


def _former_contents(live: Any, saved: Any) -> Any:
    """Return the input for ``restore``: a whole list, the additions and removals of a set; None if the container is
    unchanged.
    """
    if not isinstance(live, list):
        return (_former_items if isinstance(live, dict) else set.symmetric_difference)(live, saved) or None
    return None if [*map(id, live)] == [*map(id, saved)] else saved
