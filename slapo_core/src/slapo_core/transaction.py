"""Put a model back exactly as it was: after a step that failed, and for ``undo``.

A transaction keeps references, never copies of values. What it cannot see, a primitive tells it with ``on_undo``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from .errors import SlapoError
from .parameters import ParamFacts

_CONTAINERS = (dict, OrderedDict, list, set)


class Transaction:
    """The inverse of everything one step does, oldest first."""

    def __init__(self) -> None:
        self._inverses: list[Callable[[], None]] = []
        self._seen: set[int] = set()

    def on_undo(self, inverse: Callable[[], None]) -> None:
        """Add an inverse action; they run newest first."""
        self._inverses.append(inverse)

    def absorb(self, inner: Transaction) -> None:
        """Take over what a nested step recorded."""
        self._inverses.extend(inner._inverses)

    def touch(self, module: nn.Module) -> None:
        """Remember one module, without its children: attributes, parameters, buffers, children's names, hooks."""
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        for table in (module._parameters, module._buffers):
            for tensor in table.values():
                if tensor is not None:
                    self._touch_tensor(tensor)
        cls, attributes = type(module), dict(module.__dict__)
        containers = [(value, value.copy() if value else ()) for value in attributes.values() if type(value) in _CONTAINERS]
        self.on_undo(lambda: _restore_module(module, cls, attributes, containers))

    def touch_tree(self, root: nn.Module) -> None:
        """Remember a module with all inside it, and the graphs of traced ones."""
        for module in root.modules():
            self.touch(module)
            if isinstance(module, fx.GraphModule):
                self._touch_graph(module)

    def rollback(self) -> None:
        """Undo everything, newest first."""
        while self._inverses:
            self._inverses.pop()()

    def _touch_tensor(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        attributes = dict(tensor.__dict__)
        facts = [
            (value, value.names, value.spec, set(value.tags)) for value in attributes.values() if isinstance(value, ParamFacts)
        ]
        alias, version, grad, requires_grad = tensor.detach(), tensor._version, tensor.grad, tensor.requires_grad

        def restore() -> None:
            if tensor.data_ptr() == alias.data_ptr() and tensor._version != version:
                raise SlapoError("a primitive wrote into a parameter in place, which cannot be undone; use a new tensor")
            if tensor.data_ptr() != alias.data_ptr() or tensor.shape != alias.shape:
                tensor.data = alias
            tensor.requires_grad_(requires_grad)
            tensor.grad = grad
            tensor.__dict__.clear()
            tensor.__dict__.update(attributes)
            for live, names, spec, tags in facts:
                live.names, live.spec, live.tags = names, spec, tags

        self.on_undo(restore)

    def _touch_graph(self, module: fx.GraphModule) -> None:
        saved = fx.Graph()
        result = saved.graph_copy(module.graph, {})
        saved.output(result)

        def restore() -> None:
            module.graph = saved

        self.on_undo(restore)


def _restore_module(module: nn.Module, cls: type, attributes: dict[str, Any], containers: list[tuple[Any, Any]]) -> None:
    module.__class__ = cls
    module.__dict__.clear()
    module.__dict__.update(attributes)
    for live, saved in containers:  # in place: others, hook handles for one, refer to the live container
        live.clear()
        if isinstance(live, list):
            live.extend(saved)
        else:
            live.update(saved)
