"""Module that runs a traced graph."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate, map_arg

from slapo_core import Schedule, paths

from ..nodes import _torch_private as private
from ..nodes.nested_values import MODULE_TABLES as _TABLES
from ..nodes.nested_values import shallow_copy
from ..nodes.opaque_modules import as_original
from ..recording.module_hooks import WRAPPER_ATTRIBUTES, rebind_wrappers
from .guard import Guard, InputCheck
from .variants import GraphOwner, InlinedModule, Retrace, Variants

_COPIED_ATTRIBUTES = ("training", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class TracedModule(GraphOwner):
    """Module that runs graphs in place of a module's forward. ``graph`` is the first graph, which ``find`` searches.

    Parameters, buffers and submodules are those of the original, under their names. Modules between the traced one and those
    that the graph calls are shallow copies, so that edits do not affect the original. An edit of the graph marks the code
    stale; the next call compiles it.

    Args:
        root: The module that was traced, or any module that contains the graph's targets.
        graph: The first graph.
        guard: Conditions of the calls that the graph serves, or a check of its inputs. None passes arguments to the
            placeholders.
        constants: Tensors used by the forward that the model does not hold, by their names in the graph.
        inner: Modules that replace those at these paths.
        inlined: Paths of the modules whose forwards are part of the graph. None: no other call can be traced.
        retrace: Traces other calls; needed if ``inlined`` is given.
    """

    _lineno_map = None  # read by dynamo

    def __init__(
        self,
        root: nn.Module,
        graph: fx.Graph,
        guard: Guard | InputCheck | None = None,
        constants: Mapping[str, torch.Tensor] | None = None,
        inner: Mapping[str, nn.Module] | None = None,
        inlined: Iterable[str] | None = None,
        retrace: Retrace | None = None,
    ) -> None:
        super().__init__({}, fx.Graph(), f"Traced{root.__dict__.get('_traced_class', type(root)).__name__}")
        self._adopt(root)
        for name, tensor in (constants or {}).items():
            self.register_buffer(name, tensor, persistent=False)
        targets = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
        copies: dict[int, nn.Module] = {id(root): self}
        for path, module in (inner or {}).items():
            copies[id(root.get_submodule(path))] = copies[id(module)] = module
        # a copy replaces the original under all of its names
        names = (f"{path}." for path, child in root.named_modules(remove_duplicate=False) if path and id(child) in copies)
        for target in itertools.chain(targets, names):
            self._own_parents(target, copies)
        self.graph = graph
        self.__dict__["_variants"] = _variants(self, guard, inlined, root, retrace)
        _show_signature(self)

    def _adopt(self, root: nn.Module) -> None:
        skipped = ("graph", "code", "_variants", *WRAPPER_ATTRIBUTES)
        for name, value in shallow_copy(root).__dict__.items():
            if name in (*_TABLES, *_COPIED_ATTRIBUTES) or name not in (*self.__dict__, *skipped):
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
                copied = shallow_copy(child)
                copies[id(child)] = copies[id(copied)] = copied
            module._modules[name] = module = copies[id(child)]

    def _slapo_submodule_path(self, name: str) -> str:
        """Return the path of the module that ``name`` stands for: ``"FusedQKV_1"`` is the second that replaced a subgraph.

        The part before the number is the name or the class of the new module.
        """
        stem, _, number = name.rpartition("_")
        calls = [rewrite.call for rewrite in self._variants.rewrites] if number.isdigit() else []
        targets = dict.fromkeys(str(call.target) for call in calls if call.op == "call_module")
        found = {target: type(new).__name__ for target in targets if (new := paths.find(self, target)) is not None}
        of_stem = [path for path, kind in found.items() if stem in (kind, re.sub(r"_\d+$", "", paths.split(path)[1]))]
        return of_stem[int(number)] if of_stem and int(number) < len(of_stem) else name

    def _slapo_recompile(self) -> None:
        """Mark the first graph as changed by a recorded edit or a rollback; the next call compiles it."""
        self._variants.set_first_graph(self.graph, rewritten=True)

    def recompile(self) -> Any:
        """Mark the code stale after an edit by hand."""
        if (variants := self.__dict__.get("_variants")) is not None and not private.is_recompiled_with_parent():
            variants.edited_by_hand = True
            variants.set_first_graph(self.graph, rewritten=True)

    @property
    def code(self) -> str:
        """Python code of the first graph."""
        return self._variants.first.code

    @property
    def _code(self) -> str:
        return self.code  # printed by fx

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph that serves the call."""
        return self._variants(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return a method, property or attribute of the class that was traced, such as ``generate`` of a language model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            cls: Any = self.__dict__.get("_traced_class")
            if name.startswith("__") or not hasattr(cls, name):
                raise
            if self._variants.is_rewritten:
                forward = functools.wraps(cls.forward)(lambda view, *args, **kwargs: self.forward(*args, **kwargs))
                cls = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
            # through an object of the class, since some methods look others up on it
            return getattr(as_original(self, cls), name)

    def _shell(self) -> TracedModule:
        """Return a copy with the graphs, without parameters, buffers and submodules."""
        shell: TracedModule = object.__new__(type(self))
        empty = {name: type(self.__dict__[name])() for name in _TABLES}
        vars(shell).update(vars(self), **empty)
        return shell

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedModule:
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        return _restored_module({key: copy.deepcopy(value, memo) for key, value in self._state().items()}, graph)

    def __reduce__(self) -> Any:
        return _unpickle, (self._state(), _graph_data(self.graph))

    def _state(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_graph"}


def _variants(
    module: TracedModule,
    guard: Guard | InputCheck | None,
    inlined: Iterable[str] | None,
    root: nn.Module,
    retrace: Retrace | None,
) -> Variants:
    """Return the graphs of a new traced module that was made from ``root``."""
    before = variants_of(root)
    inner = None
    if before is not None:
        assert isinstance(root, TracedModule)
        inner = root._shell() if before.is_rewritten else before.inner
    cls = module.__dict__["_traced_class"]
    can_trace = inlined is not None and not (cls is nn.Module and inner is None)
    known = {path: InlinedModule.of(module.get_submodule(path)) for path in inlined or ()} if can_trace else None
    variants = Variants(module.graph, cls.__name__, guard, known, inner, retrace)
    variants.shared = _shared_places(module) if can_trace else []
    return variants


def _shared_places(module: TracedModule) -> list[list[tuple[str, ...]]]:
    """Return the places of each object that the graph names and the module holds at several places."""
    used = {str(node.target) for op in ("call_module", "get_attr") for node in module.graph.find_nodes(op=op)}
    places: dict[int, list[str]] = {}
    for named in (module.named_modules, module.named_parameters, module.named_buffers):
        for path, held in named(remove_duplicate=False):
            places.setdefault(id(held), []).append(path)
    return [[tuple(path.split(".")) for path in each] for each in places.values() if len(each) > 1 and used & {*each}]


def variants_of(module: nn.Module) -> Variants | None:
    """Return the graphs of a traced module, or None for any other."""
    return module.__dict__.get("_variants") if isinstance(module, TracedModule) else None


def compile_anew(module: fx.GraphModule) -> None:
    """Mark the first graph as changed by a recorded edit or an undo; the next call compiles it."""
    getattr(module, "_slapo_recompile", module.recompile)()


def guard_of(module: nn.Module) -> Guard | None:
    """Return the guard of the first graph of a traced module, or None."""
    return None if (variants := variants_of(module)) is None else variants.guard


def input_check_of(module: nn.Module) -> InputCheck | None:
    """Return the input check of a traced module without a forward behind it, or None."""
    return None if (variants := variants_of(module)) is None else variants.input_check


def _show_signature(module: TracedModule) -> None:
    """Let ``inspect.signature(module.forward)`` be that of the forward that was traced, and a container one as before."""

    def forward(self: TracedModule, *args: Any, **kwargs: Any) -> Any:
        return TracedModule.forward(self, *args, **kwargs)

    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = guard.parameters.parameters if (guard := guard_of(module)) is not None else {}
    if guard is not None and "self" not in parameters:
        forward.__signature__ = inspect.Signature([itself, *parameters.values()])  # type: ignore[attr-defined]
        forward.__doc__ = TracedModule.forward.__doc__
        type(module).forward = forward  # type: ignore[method-assign]  # fx makes a class for each module
    for name in ("__len__", "__iter__", "__getitem__", "__contains__"):
        if (method := getattr(module.__dict__["_traced_class"], name, None)) is not None:
            setattr(type(module), name, method)


def subtree(root: nn.Module, targets: Iterable[str]) -> nn.Module:
    """Return a copy of the module tree with only the modules, parameters and buffers that ``targets`` name."""
    copied = shallow_copy(root, bare=True)
    for target in sorted(set(targets)):
        source, module = root, copied
        *parents, name = target.split(".")
        for parent in parents:
            source = source.get_submodule(parent)
            if parent not in module._modules:
                module._modules[parent] = shallow_copy(source, bare=True)
            module = module.get_submodule(parent)
        for table in _TABLES[:3]:
            if name in source.__dict__[table]:
                module.__dict__[table][name] = source.__dict__[table][name]
    return copied


@contextmanager
def as_untraced(schedule: Schedule) -> Iterator[None]:
    """Put the originals in place of traced modules in a ``with`` block; then the traced ones are back, with the changes.

    The originals share attributes, parameters, submodules and hooks with the traced modules, so a step changes both. Modules
    with a rewritten graph stay. A module that the step replaced stays replaced.
    """
    top = schedule.root_module
    views: dict[nn.Module, nn.Module] = {}
    for module in top.modules():
        variants = variants_of(module)
        if variants is not None and not variants.is_rewritten and variants.inner is None:
            views[as_original(module)] = module
    for module in list(top.modules()) if views else ():
        schedule.touch(module)
    for view, module in views.items():
        schedule.share_metadata(module, view)
    if views:
        schedule.replace_modules({module: view for view, module in views.items()})
    try:
        yield
    finally:
        if views:
            schedule.replace_modules(views)
        for view, module in views.items():
            schedule.share_metadata(view, module)
            rebind_wrappers(module)


def _restored_module(state: dict[str, Any], graph: fx.Graph) -> TracedModule:
    module: TracedModule = TracedModule.__new__(TracedModule)
    variants = state.pop("_variants")
    module.__dict__.update(state)
    module.graph = graph
    module.__dict__["_variants"] = variants
    variants.set_first_graph(graph)
    _show_signature(module)
    return module


class _NodeName(str):
    """Reference to a node in a pickled graph."""


def _graph_data(graph: fx.Graph) -> list[Any]:
    def meta(node: fx.Node) -> dict[str, Any]:
        kept = {key: value for key, value in node.meta.items() if key in ("source", "regions", "mutates")}
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            kept["val"] = val.shape, val.stride(), val.dtype, val.device, val.requires_grad
        return kept

    def arguments(node: fx.Node) -> Any:
        return map_arg((node.args, node.kwargs), lambda other: _NodeName(other.name))

    return [(node.name, node.op, node.target, *arguments(node), meta(node)) for node in graph.nodes]


def _unpickle(state: dict[str, Any], data: list[Any]) -> TracedModule:
    graph, mode = fx.Graph(), private.FakeMode()
    nodes: dict[str, fx.Node] = {}
    for name, op, target, args, kwargs, meta in data:
        args, kwargs = map_aggregate((args, kwargs), lambda value: nodes[value] if isinstance(value, _NodeName) else value)
        nodes[name] = graph.create_node(op, target, args, kwargs, name)
        if "val" in meta:
            shape, stride, dtype, device, requires_grad = meta["val"]
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta").requires_grad_(requires_grad)
            meta["val"] = private.fake_like(mode, empty, device)
        nodes[name].meta.update(meta)
    return _restored_module(state, graph)
