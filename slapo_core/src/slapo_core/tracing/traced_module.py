"""The module that runs a traced graph."""

from __future__ import annotations

import copy
import inspect
import itertools
import linecache
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate, map_arg

from ..errors import TraceError
from . import _torch_private as private
from . import regions
from .structures import difference, fingerprint, is_input, walk

_serial = itertools.count()


@dataclass
class Guard:
    """What a forward was traced for.

    Args:
        parameters: Its signature.
        traced: Fingerprint of every argument.
        placeholders: Arguments that hold tensors or changeable objects: the graph's inputs. The others are part of the graph.
        training: The module's mode.
        autocast: The autocast it ran under.
        device: Where its tensors were.
        refuse: The module was called in ways that one graph cannot stand for.
    """

    parameters: inspect.Signature
    traced: dict[str, Any]
    placeholders: tuple[str, ...]
    training: bool
    autocast: regions.State
    device: torch.device | None = None
    refuse: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Guard:
        """The guard of a call."""
        signature = inspect.signature(module.forward)
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
        parameters = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
        guard = cls(parameters, {}, (), module.training, regions.autocast_state())
        values = guard.values(args, kwargs)
        guard.device = device_of(values)
        guard.traced = {name: fingerprint(value) for name, value in values.items()}
        guard.placeholders = tuple(name for name, value in values.items() if is_input(value))
        return guard

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Argument name to value, defaults included; those of ``**kwargs`` under their own names."""
        bound = self.parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        values: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            several = self.parameters.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            values.update(value if several else {name: value})
        return values

    def check(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The values of the graph's inputs; ``TraceError`` when the call is not the one that was traced."""
        if module.training != self.training:
            modes = {True: "train", False: "eval"}
            raise TraceError(
                f"the module is in {modes[module.training]} mode but was traced in {modes[self.training]} mode; trace it again in this mode"
            )
        if (autocast := regions.autocast_state()) != self.autocast:
            raise TraceError(f"the call is under autocast {autocast}, traced under {self.autocast or 'none'}; trace it again under this autocast")
        values = self.values(args, kwargs)
        given = {name: fingerprint(value) for name, value in values.items()}
        if given != self.traced:
            none = fingerprint(None)
            for name in [*self.traced, *given]:
                old, new = self.traced.get(name, none), given.get(name, none)
                if old != new:
                    raise TraceError(f"{difference(old, new, name)}; trace the module again with inputs like these")
        return {name: values[name] for name in self.placeholders}


class TracedModule(fx.GraphModule):
    """A graph that runs in place of a module's forward.

    Parameters, buffers and submodules are those of the original, under their names; the modules between the traced one and the
    ones the graph calls are shallow copies, so that edits do not reach the original. An edit of the graph marks the code stale; the next call compiles it.

    Args:
        root: The module that was traced, or any module that holds what the graph's targets name.
        graph: Its graph.
        guard: Checked at every call, where there is one; else the call's arguments go to the graph's placeholders.
        constants: Tensors the forward used that the model does not hold, by the names in the graph.
        inner: Modules that take the place of those at these paths.
    """

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
        targets = {node.target for node in graph.nodes if node.op in ("call_module", "get_attr")}
        copies: dict[int, nn.Module] = {id(root): self}
        for target in [*targets, *(inner or {})]:
            self._own_parents(str(target), copies)
        for path, module in (inner or {}).items():
            parent, _, name = path.rpartition(".")
            self.get_submodule(parent)._modules[name] = module
        self.graph = graph

    def _adopt(self, root: nn.Module) -> None:
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = root.__dict__[name].copy()
        for name, value in root.__dict__.items():
            if not name.startswith("_") and name not in self.__dict__ and name not in ("graph", "code", "forward"):
                self.__dict__[name] = value
        self.training = root.training

    def _own_parents(self, target: str, copies: dict[int, nn.Module]) -> None:
        module: nn.Module = self
        for name in target.split(".")[:-1]:
            child = module._modules[name]
            assert child is not None
            if id(child) not in copies:
                copied = _shallow_copy(child)
                copies[id(child)] = copies[id(copied)] = copied
            module._modules[name] = copies[id(child)]
            module = copies[id(child)]

    def recompile(self) -> Any:
        """Mark the code stale."""
        self.__dict__["_run"] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph."""
        if self.guard is not None:
            args, kwargs = (), self.guard.check(self, args, kwargs)
            self._move_constants(device_of(kwargs))
        if self.__dict__.get("_run") is None:
            self.__dict__["_run"], self.__dict__["_code"] = compile_graph(self.graph, type(self).__name__)
        before = regions.current()
        try:
            return self.__dict__["_run"](self, *args, **kwargs)
        finally:
            regions.leave(before)

    def _move_constants(self, device: torch.device | None) -> None:
        """The graph says where the forward made tensors; when its inputs come from another device, that is meant."""
        assert self.guard is not None
        old = self.guard.device
        if device is None or old is None or device == old:
            return
        for node in self.graph.nodes:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), lambda value: device if value == old else value)
        self.guard.device = device
        self.recompile()

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedModule:
        return _restore({key: copy.deepcopy(value, memo) for key, value in self._state().items()}, _copy_graph(self.graph))

    def __reduce__(self) -> Any:
        return _unpickle, (self._state(), _graph_data(self.graph))

    def _state(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_graph", "_run", "_code")}


def device_of(value: Any) -> torch.device | None:
    """Device of the first tensor inside."""
    return next((part.device for _, part in walk(value) if isinstance(part, torch.Tensor)), None)


def _restore(state: dict[str, Any], graph: fx.Graph) -> TracedModule:
    module = TracedModule.__new__(TracedModule)
    module.__dict__.update(state)
    module.graph = graph
    return module


def _copy_graph(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


class _Name(str):
    """A node, in a pickled graph."""


def _graph_data(graph: fx.Graph) -> list[Any]:
    def plain(value: Any) -> Any:
        return map_arg(value, lambda node: _Name(node.name))

    def meta(node: fx.Node) -> dict[str, Any]:
        kept = {key: value for key, value in node.meta.items() if key in ("source", "regions", "mutates")}
        val = node.meta.get("val")
        return {**kept, "val": (val.shape, val.stride(), val.dtype, val.device, val.requires_grad)} if isinstance(val, torch.Tensor) else kept

    return [(node.name, node.op, node.target, plain(node.args), plain(node.kwargs), meta(node)) for node in graph.nodes]


def _unpickle(state: dict[str, Any], data: list[Any]) -> TracedModule:
    graph, nodes, mode = fx.Graph(), {}, private.FakeTensorMode()
    for name, op, target, args, kwargs, meta in data:
        args, kwargs = map_aggregate((args, kwargs), lambda value: nodes[value] if isinstance(value, _Name) else value)
        nodes[name] = graph.create_node(op, target, args, kwargs, name)
        if "val" in meta:
            shape, stride, dtype, device, requires_grad = meta["val"]
            meta["val"] = private.fake_like(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device).requires_grad_(requires_grad)
        nodes[name].meta.update(meta)
    return _restore(state, graph)


def _shallow_copy(module: nn.Module) -> nn.Module:
    copied = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        copied.__dict__[name] = module.__dict__[name].copy()
    return copied


def compile_graph(graph: fx.Graph, name: str) -> tuple[Any, str]:
    """A function ``run(self, *inputs)`` and its source.

    fx's own code generator spells every function and constant as text; here those that have no plain spelling are globals.
    """
    writer = _Writer({name for node in graph.nodes for name in (node.name, str(node.target))})
    last = {node: user for user in graph.nodes for node in user.all_input_nodes}
    dying: dict[fx.Node, list[str]] = {}
    for node, user in last.items():
        dying.setdefault(user, []).append(node.name)
    inputs, body = [writer.root], ["    pass"]
    for node in graph.nodes:
        if node.op == "placeholder":
            default = f"={writer.text(node.args[0])}" if node.args else ""
            given = str(node.target).removeprefix("*")
            given = given if f"{given}{default}" not in inputs else node.name
            inputs.append(f"{given}{default}")
            if node.name != given:
                body.append(f"    {node.name} = {given}")
        elif node.op == "output":
            body.append(f"    return {writer.text(node.args[0])}")
        else:
            frees = "".join(f"; {other} = None" for other in dying.get(node, ()))
            body.append(f"    {node.name} = {writer.call(node)}" + ("" if node.users else f"; {node.name} = None") + frees)
    source = "\n".join([f"def run({', '.join(inputs)}):", *body]) + "\n"
    file = f"<{name}.{next(_serial)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), writer.names)
    return writer.names["run"], source


class _Writer:
    """Python text of a graph's values; what has none becomes a global."""

    def __init__(self, taken: set[str]) -> None:
        self.taken = taken
        self.names: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        self.root = self._free("self")

    def _free(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        return name

    def text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, (tuple, list)) and type(value).__module__ in ("builtins", "torch.fx.immutable_collections"):
            inner = ", ".join(map(self.text, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self.text(key)}: {self.text(part)}" for key, part in value.items()) + "}"
        if isinstance(value, slice):
            return f"{self.known_as(slice)}({', '.join(map(self.text, (value.start, value.stop, value.step)))})"
        if type(value) in (type(None), bool, int, str):
            return repr(value)
        return self.known_as(value)

    def known_as(self, value: Any) -> str:
        """The global that holds ``value``."""
        if id(value) not in self.known:
            label = str(getattr(value, "__name__", type(value).__name__))
            name = self._free(f"_{len(self.known)}_{label if label.isidentifier() else ''}")
            self.known[id(value)], self.names[name] = name, value
        return self.known[id(value)]

    def call(self, node: fx.Node) -> str:
        """The expression of a node."""
        arguments = [*map(self.text, node.args)]
        named = [f"{key}={self.text(value)}" for key, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{arguments[0]}.{node.target}({', '.join([*arguments[1:], *named])})"
        if node.op == "call_function":
            return f"{self.known_as(node.target)}({', '.join([*arguments, *named])})"
        *parents, name = str(node.target).split(".")
        holder = self.root + "".join(f"._modules[{parent!r}]" for parent in parents)
        if node.op == "call_module":
            return f"{holder}._modules[{name!r}]({', '.join([*arguments, *named])})"
        return f"getattr({holder}, {name!r})"


def subtree(root: nn.Module, targets: Iterable[str]) -> nn.Module:
    """A copy of the module tree that holds only what ``targets`` (paths of modules, parameters, buffers) name."""
    copied = _bare_copy(root)
    for target in sorted(set(targets)):
        source, module = root, copied
        *parents, name = target.split(".")
        for parent in parents:
            source = source.get_submodule(parent)
            if module._modules.get(parent) is None:
                module._modules[parent] = _bare_copy(source)
            module = module.get_submodule(parent)
        for table in ("_modules", "_parameters", "_buffers"):
            if name in source.__dict__[table]:
                module.__dict__[table][name] = source.__dict__[table][name]
    return copied


def _bare_copy(module: nn.Module) -> nn.Module:
    copied = _shallow_copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        copied.__dict__[name].clear()
    return copied
