"""The module that runs a traced graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate, map_arg

from . import _torch_private as private
from . import regions
from .codegen import compile_graph
from .guard import Guard, device_of

_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_KEPT = ("training", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class TracedModule(fx.GraphModule):
    """A graph that runs in place of a module's forward.

    Parameters, buffers and submodules are those of the original, under their names; the modules between the traced one and the
    ones the graph calls are shallow copies, so that edits do not reach the original. An edit of the graph marks the code stale;
    the next call compiles it.

    Args:
        root: The module that was traced, or any module that holds what the graph's targets name.
        graph: Its graph.
        guard: Checked at every call, where there is one; else the call's arguments go to the graph's placeholders.
        constants: Tensors the forward used that the model does not hold, by the names in the graph.
        inner: Modules that take the place of those at these paths.

    Attributes:
        through: Makes what is called of the graph's function, which takes the module and its inputs.
    """

    through: Callable[[Any], Any] = staticmethod(lambda run: run)

    def __init__(
        self,
        root: nn.Module,
        graph: fx.Graph,
        guard: Guard | None = None,
        constants: Mapping[str, torch.Tensor] | None = None,
        inner: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__({}, fx.Graph(), f"Traced{type(root).__name__}")
        self._adopt(root)
        self.guard = guard
        for name, tensor in (constants or {}).items():
            self.register_buffer(name, tensor, persistent=False)
        targets = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
        copies: dict[int, nn.Module] = {id(root): self}
        for target in [*targets, *(inner or {})]:
            self._own_parents(target, copies)
        for path, module in (inner or {}).items():
            parent, _, name = path.rpartition(".")
            self.get_submodule(parent)._modules[name] = module
        self.graph = graph

    def _adopt(self, root: nn.Module) -> None:
        for name, value in _shallow_copy(root).__dict__.items():
            if name in (*_TABLES, *_KEPT) or name not in (*self.__dict__, "graph", "code", "forward"):
                self.__dict__[name] = value
        self.__dict__.setdefault("_traced_class", nn.Module if isinstance(root, fx.GraphModule) else type(root))
        self.__dict__["_version"] = root._version

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        as_original(self)._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        as_original(self)._load_from_state_dict(*args, **kwargs)

    def _own_parents(self, target: str, copies: dict[int, nn.Module]) -> None:
        module: nn.Module = self
        for name in target.split(".")[:-1]:
            child = module.get_submodule(name)
            if id(child) not in copies:
                copied = _shallow_copy(child)
                copies[id(child)] = copies[id(copied)] = copied
            module._modules[name] = module = copies[id(child)]

    def recompile(self) -> Any:
        """Mark the code stale."""
        self.__dict__["_run"] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph."""
        if self.guard is not None:
            args, kwargs = (), self.guard.check(self, args, kwargs)
            self._move_constants(self.guard, device_of(kwargs))
        if self.__dict__.get("_run") is None:
            self.__dict__["_run"], self.__dict__["_code"] = compile_graph(self.graph, type(self).__name__)
        before = regions.current()
        try:
            return self.through(self.__dict__["_run"])(self, *args, **kwargs)
        finally:
            if regions.current() != before:  # an error inside a region
                regions.leave(before)

    def _move_constants(self, guard: Guard, device: torch.device | None) -> None:
        """The graph says where the forward made tensors: where its inputs were. Now that is another device."""
        old = guard.device
        if device is None or old is None or device == old:
            return
        for node in self.graph.nodes:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), lambda value: device if value == old else value)
        guard.device = device
        self.recompile()

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedModule:
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        return _restore({key: copy.deepcopy(value, memo) for key, value in self._state().items()}, graph)

    def __reduce__(self) -> Any:
        return _unpickle, (self._state(), _graph_data(self.graph))

    def _state(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_graph", "_run", "_code")}


def as_original(module: nn.Module) -> nn.Module:
    """A module as an object of the class it was traced from, with the same attributes."""
    original: nn.Module = object.__new__(module.__dict__.get("_traced_class", type(module)))
    object.__setattr__(original, "__dict__", module.__dict__)
    return original


def subtree(root: nn.Module, targets: Iterable[str]) -> nn.Module:
    """A copy of the module tree that holds only what ``targets`` (paths of modules, parameters, buffers) name."""
    copied = _shallow_copy(root, bare=True)
    for target in sorted(set(targets)):
        source, module = root, copied
        *parents, name = target.split(".")
        for parent in parents:
            source = source.get_submodule(parent)
            if parent not in module._modules:
                module._modules[parent] = _shallow_copy(source, bare=True)
            module = module.get_submodule(parent)
        for table in _TABLES[:3]:
            if name in source.__dict__[table]:
                module.__dict__[table][name] = source.__dict__[table][name]
    return copied


def _shallow_copy(module: nn.Module, bare: bool = False) -> nn.Module:
    copied: nn.Module = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    for name in _TABLES:
        copied.__dict__[name] = type(module.__dict__[name])() if bare else module.__dict__[name].copy()
    return copied


def _restore(state: dict[str, Any], graph: fx.Graph) -> TracedModule:
    module: TracedModule = TracedModule.__new__(TracedModule)
    module.__dict__.update(state)
    module.graph = graph
    return module


class _Name(str):
    """A node, in a pickled graph."""


def _graph_data(graph: fx.Graph) -> list[Any]:
    def meta(node: fx.Node) -> dict[str, Any]:
        kept = {key: value for key, value in node.meta.items() if key in ("source", "regions", "mutates")}
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            kept["val"] = val.shape, val.stride(), val.dtype, val.device, val.requires_grad
        return kept

    def arguments(node: fx.Node) -> Any:
        return map_arg((node.args, node.kwargs), lambda other: _Name(other.name))

    return [(node.name, node.op, node.target, *arguments(node), meta(node)) for node in graph.nodes]


def _unpickle(state: dict[str, Any], data: list[Any]) -> TracedModule:
    graph, mode = fx.Graph(), private.FakeMode()
    nodes: dict[str, fx.Node] = {}
    for name, op, target, args, kwargs, meta in data:
        args, kwargs = map_aggregate((args, kwargs), lambda value: nodes[value] if isinstance(value, _Name) else value)
        nodes[name] = graph.create_node(op, target, args, kwargs, name)
        if "val" in meta:
            shape, stride, dtype, device, requires_grad = meta["val"]
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta").requires_grad_(requires_grad)
            meta["val"] = private.fake_like(mode, empty, device)
        nodes[name].meta.update(meta)
    return _restore(state, graph)
