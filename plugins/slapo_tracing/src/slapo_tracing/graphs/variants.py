"""Graphs of one traced module. Each serves the calls whose own trace gave that graph.

A call with another shape, dtype or mode, or with ``None`` for a tensor, is traced once. If its graph exists already, since
sizes are nodes, that graph serves it too. Otherwise its graph is kept beside the others, with the same rewrites. A call that
cannot be traced runs the module's own forward, if there are no rewrites to lose.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from slapo_core import ScheduleError, TraceError, get_logger

from ..nodes import _torch_private as private
from ..nodes import mode_regions
from ..nodes.codegen import compile_graph
from ..nodes.graph_comparison import Twins, graph_data, same_graph
from ..nodes.nested_values import Hidden, shallow_copy
from ..nodes.opaque_modules import as_original, is_opaque
from ..recording.attribute_reads import submodule_at
from ..recording.module_hooks import HOOK_ATTRIBUTES, WRAPPER_ATTRIBUTES, is_hooked
from ..recording.sandbox import Sandbox
from .guard import Call, Guard, InputCheck, device_of

_MAX_GRAPHS = 32
_MAX_CALLS = 256


class GraphOwner(fx.GraphModule):
    """Base class of ``TracedModule``: what the graphs of a module use of it.

    Attributes:
        through: Wraps the graph's function, which takes the module and its inputs, before it is called.
    """

    through: Callable[[Any], Any] = staticmethod(lambda run: run)
    _variants: Variants

    def _add_constants(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
        """Register the constants of another graph under free names, and rename them in the graph."""
        names: dict[str, str] = {}
        for name, tensor in constants.items():
            free = (f"_tensor_constant{number}" for number in itertools.count())
            names[name] = next(each for each in free if each not in self._buffers)
            self.register_buffer(names[name], tensor, persistent=False)
        for node in graph.find_nodes(op="get_attr"):
            node.target = names.get(str(node.target), node.target)


class Rewrite(Protocol):
    """Edit of the first graph that can be repeated on another one."""

    call: Any
    """Call that replaced the nodes, with its ``op`` and ``target``."""

    def redo(self, module: GraphOwner, graph: fx.Graph, twins: Twins) -> None:
        """Repeat the edit on ``graph``; ``twins`` maps the name of each node of the first graph to a node of this one."""


class Retrace(Protocol):
    """Function that traces another call."""

    def __call__(
        self, module: nn.Module, args: Any, kwargs: Any, inlined: frozenset[str], /
    ) -> tuple[fx.Graph, Guard, dict[str, Any]]:
        """Return the graph of a call, its guard and its constants; ``inlined`` are the paths of inlined modules."""


_SAME_HOOKS = ("as before",)


class InlinedModule(NamedTuple):
    """Class and hooks of a module whose forward is part of the graphs; the hooks are recorded with it."""

    cls: type
    hooks: tuple[Any, ...]

    @classmethod
    def of(cls, module: nn.Module) -> InlinedModule:
        return cls(type(module), _hooks_of(module) if is_hooked(module) else ())

    def changed_hooks(self, root: nn.Module, path: str) -> tuple[Any, ...] | None:
        """Compare with the module at ``path``.

        Returns:
            ``_SAME_HOOKS`` if nothing changed, the new hooks if they differ, or None if the module must now stay whole.
        """
        module = submodule_at(root, path.split("."))
        if module is None or type(module) is not self.cls:
            return None
        hooked = is_hooked(module)
        if ("forward" in module.__dict__ or hooked) and is_opaque(module, inlined=True):
            return None
        hooks = _hooks_of(module) if hooked else ()
        return _SAME_HOOKS if hooks == self.hooks else hooks


def _ids_at(root: nn.Module, places: Sequence[tuple[str, ...]]) -> set[int]:
    found: set[int] = set()
    for *path, name in places:
        module = submodule_at(root, path)
        for table in (module._modules, module._parameters, module._buffers) if module is not None else ():
            if table.get(name) is not None:
                found.add(id(table[name]))
    return found


def _hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the hooks of a module, without those that exist for one trace only."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return tuple(hook for hook in hooks if not getattr(hook, "of_trace", False))


class Variant(Hidden):
    """One graph of a traced module, compiled when first run; ``name`` is that of the module, for tracebacks."""

    def __init__(self, graph: fx.Graph, name: str) -> None:
        self.graph, self.name = graph, name
        self.function: Callable[..., Any] | None = None
        self.source = ""
        self.switches = False
        """True if the graph switches gradient mode or autocast."""
        self.original_data: list[Any] | None = None

    def run(self, module: GraphOwner, inputs: Mapping[str, Any], args: Sequence[Any] = ()) -> Any:
        """Run the graph on the traced module, wrapped by the module's ``through``."""
        return self._call(module.through(self.compile()), module, inputs, args)

    def run_on(self, module: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Run the graph on another module that contains the graph's targets."""
        return self._call(self.compile(), module, inputs)

    def _call(
        self, function: Callable[..., Any], module: nn.Module, inputs: Mapping[str, Any], args: Sequence[Any] = ()
    ) -> Any:
        """Call the function of the graph, and restore gradient mode and autocast afterwards, even after an error."""
        before = mode_regions.current_modes() if self.switches else None
        try:
            return function(module, *args, **inputs)
        finally:
            if before is not None and mode_regions.current_modes() != before:  # an error left a region early
                mode_regions.leave_modes(before)

    def compile(self) -> Callable[..., Any]:
        """Return the function of the graph, compiled on demand."""
        if self.function is None:
            self.function, self.source = compile_graph(self.graph, self.name)
            self.switches = any(map(mode_regions.is_mode_node, self.graph.nodes))
        return self.function

    @property
    def code(self) -> str:
        """Python code of the graph."""
        return self.source or compile_graph(self.graph, self.name)[1]

    def move_constants(self, guard: Guard | InputCheck, inputs: Mapping[str, Any]) -> None:
        """Change the devices in the graph to that of the inputs, if the inputs have moved since the trace.

        The graph has the device on which the forward created tensors, which is that of its inputs.
        """
        old, new = guard.device, device_of(inputs)
        if new is None or old is None or new == old:
            return
        guard.device = new
        for node in self.graph.nodes:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), lambda value: new if value == old else value)
        self.function = None


class Variants(Hidden):
    """All graphs of a traced module.

    Args:
        graph: The first graph.
        label: Name of the class that was traced.
        guard: Conditions of the calls that the first graph serves. None: any call, whose arguments go to the placeholders.
        inlined: The modules whose forwards are part of the graph, by path. None: no other call can be traced.
        inner: The rewritten module that was traced, without parameters and submodules. None: the class's own forward was
            traced.
        retrace: Traces other calls; needed if ``inlined`` is given.
    """

    def __init__(
        self,
        graph: fx.Graph,
        label: str,
        guard: Guard | InputCheck | None,
        inlined: Mapping[str, InlinedModule] | None,
        inner: GraphOwner | None,
        retrace: Retrace | None,
    ) -> None:
        self.label, self.inlined, self.inner, self.retrace = label, inlined, inner, retrace
        self.shared: list[list[tuple[str, ...]]] = []
        """Places of each object that the first graph names and the traced module holds at several places."""
        self.guard = guard if isinstance(guard, Guard) else None
        self.input_check = None if isinstance(guard, Guard) else guard
        self.rewrites: list[Rewrite] = []
        self.removed_modules: dict[str, nn.Module] = {}
        """Submodules that rewrites removed, by path, on the meta device: other calls are traced with them, then rewritten."""
        self.edited_by_hand = False
        self.original_data: list[Any] | None = None
        """Data of the first graph before its first rewrite."""
        self.set_first_graph(graph)

    def set_first_graph(self, graph: fx.Graph, rewritten: bool = False) -> None:
        """Make this the first graph, not compiled yet, and drop all others."""
        if rewritten and self.guard is not None and self.guard.attributes is not None:
            self.guard.attributes.is_rewritten = True
        self.first = Variant(graph, f"Traced{self.label}")
        self.others: list[Variant] = []
        self.calls: dict[Any, list[tuple[Guard, Variant | None]]] = {}
        self.recent: tuple[Guard, Variant | None] | None = None

    def begin_rewrite(self, module: fx.GraphModule) -> None:
        """Save the first graph before its first rewrite."""
        if not self.rewrites and self.original_data is None:
            self.original_data = graph_data(module.graph, module)

    @property
    def is_changed(self) -> bool:
        """True if the first graph differs from the traced one."""
        return bool(self.rewrites) or self.edited_by_hand

    @property
    def is_rewritten(self) -> bool:
        """True if the first graph differs from the traced forward, or has no forward behind it."""
        return self.is_changed or self.guard is None

    # Restored with its whole state at once: rewrites refer to modules that need it while they are restored.

    def __deepcopy__(self, memo: dict[int, Any]) -> Variants:
        return _restored_variants({key: copy.deepcopy(value, memo) for key, value in self._state().items()})

    def __reduce__(self) -> Any:
        return _restored_variants, (self._state(),)

    def _state(self) -> dict[str, Any]:
        """Return the attributes without the graphs: the module has the first graph, and others are traced again."""
        return {key: value for key, value in vars(self).items() if key not in ("first", "others", "calls", "recent")}

    def __call__(self, module: GraphOwner, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.guard is None:
            args, kwargs = self._check_inputs(module, args, kwargs)
            return self.first.run(module, kwargs, args)
        resolve = self._resolve_uncompiled if torch.compiler.is_compiling() else self.resolve
        return resolve(module, args, kwargs)[0]()

    def graph_for(self, module: GraphOwner, args: Any, kwargs: Any) -> tuple[fx.Graph, dict[str, Any], list[tuple[str, str]]]:
        """Return the graph of a call, its inputs, and path and name of the attributes that it depends on."""
        if self.guard is None:
            args, kwargs = self._check_inputs(module, args, kwargs)
            placeholders = [str(node.target) for node in self.first.graph.find_nodes(op="placeholder")]
            return self.first.graph, {**dict(zip(placeholders, args, strict=False)), **kwargs}, []
        forward, variant, guard = self.resolve(module, args, kwargs)
        assert variant is not None
        assert guard is not None
        return variant.graph, forward.args[1], guard.attributes.names if guard.attributes is not None else []

    def inlined_modules(self, graph: fx.Graph) -> list[str]:
        """Return the paths of the modules whose forwards are part of one of the graphs."""
        called = {str(node.target) for node in graph.find_nodes(op="call_module")}
        return [path for path in self.inlined or () if path not in called]

    def resolve(self, module: GraphOwner, args: Any, kwargs: Any) -> tuple[partial[Any], Variant | None, Guard | None]:
        """Return the function that runs a call, its graph and its guard; the latter are None for the forward itself.

        Raises:
            TraceError: the graph was rewritten, and the rewrites cannot be repeated on the graph of this call; or an attribute
                was set on the original module, which this one replaces.
        """
        assert self.guard is not None
        if self.guard.attributes is not None:
            self.guard.attributes.check_original(module)
        call = Call(self.guard.parameters, module, args, kwargs)
        call.changed = self._changed_modules(module)
        known = (self.guard, None) if Sandbox.open_count and not self.is_rewritten else None
        guard, variant = self._find(module, call) or known or self._add(module, call, args, kwargs)
        if variant is None or (guard.checks_inside and not self.is_rewritten):
            return partial(self.original(module), *args, **kwargs), None, None
        inputs = {name: call.values[name] for name in guard.placeholders}
        variant.move_constants(guard, inputs)
        variant.compile()
        return partial(variant.run, module, inputs), variant, guard

    _resolve_uncompiled = private.not_compiled(resolve)

    def _check_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.input_check is None:
            return args, kwargs
        inputs = self.input_check.check(module, args, kwargs)
        self.first.move_constants(self.input_check, inputs)
        return (), inputs

    def original(self, module: nn.Module) -> Callable[..., Any]:
        """Return the forward that was traced, bound to the module's present attributes, parameters and submodules."""
        view = self.before_trace(module)
        return MethodType(type(view).forward, view)

    def before_trace(self, module: nn.Module, bare: bool = False) -> nn.Module:
        """Return a module with these graphs as it was before, with its present attributes, parameters and submodules.

        With ``bare``, it has no hooks and wrappers, and an attribute dict of its own.
        """
        shell = self.inner
        view: nn.Module = as_original(module) if shell is None else object.__new__(type(shell))
        if shell is not None or bare:
            own = {name: value for name, value in module.__dict__.items() if not bare or name not in WRAPPER_ATTRIBUTES}
            view.__dict__ = {**own, **{name: OrderedDict() for name in HOOK_ATTRIBUTES if bare and name in own}}
        if shell is not None:
            view.__dict__.update(_graph=shell.graph, _variants=shell._variants)
        return view

    def _find(self, module: GraphOwner, call: Call) -> tuple[Guard, Variant | None] | None:
        assert self.guard is not None
        first = (self.guard, self.first)
        for guard, variant in (first, *filter(None, (self.recent,))) if not call.changed else ():
            if guard.problem(module, call) is None:
                return guard, variant
        for guard, variant in self.calls.get(call.key, ()) if self.calls else ():
            if guard.problem(module, call) is None:
                self.recent = None if call.changed else (guard, variant)
                return guard, variant
        return None

    def _changed_modules(self, module: GraphOwner) -> dict[str, tuple[Any, ...] | None]:
        """Return the inlined modules that changed since the first trace: path to new hooks, or None to keep them whole."""
        now = {path: each.changed_hooks(module, path) for path, each in self.inlined.items()} if self.inlined else {}
        changed = {path: hooks for path, hooks in now.items() if hooks is not _SAME_HOOKS}
        changed.update((".".join(places[0]), ()) for places in self.shared if len(_ids_at(module, places)) > 1)
        return changed

    def _add(self, module: GraphOwner, call: Call, args: Any, kwargs: Any) -> tuple[Guard, Variant | None]:
        try:
            guard, variant = self._trace_variant(module, args, kwargs, call.changed)
            if asked := next(filter(None, (each.problem(call.values) for each in guard.expectations)), None):
                raise TraceError(asked)  # fake tensors lack some facts of real ones
        except Exception as err:  # e.g. fake tensors support less inside a transform of torch.func
            if self.is_rewritten:
                problem = self.guard and self.guard.problem(module, call)
                if call.changed:
                    problem = f"{next(iter(call.changed))!r} was wrapped, got hooks, or was replaced, here or at another place"
                raise TraceError(f"{problem}, and the rewritten graph of the {self.label} has no other form: {err}") from err
            get_logger().warning("the traced %s runs its own forward, not a graph, for calls like this: %s", self.label, err)
            guard, variant = Guard.of(module, args, kwargs), None
        guard.share_attributes(self.guard, module)
        if len(self.calls) >= _MAX_CALLS:
            self.calls.clear()
        self.recent = None if call.changed else (guard, variant)
        self.calls.setdefault(call.key, []).insert(0, (guard, variant))
        del self.calls[call.key][_MAX_GRAPHS:]
        return guard, variant

    def _trace_variant(
        self, module: GraphOwner, args: Any, kwargs: Any, changed: Mapping[str, Any]
    ) -> tuple[Guard, Variant | None]:
        if self.edited_by_hand:
            what = "it was edited by hand, which cannot be repeated"
            raise TraceError(f"{what}; use replace or fuse, or run calls like the first")
        if self.inlined is None or self.retrace is None:
            raise TraceError("the class that it was traced from is not known")
        with private.without_observers():
            former = with_modules(self.before_trace(module, bare=True), self.removed_modules)
            inlined = frozenset(path for path in self.inlined if changed.get(path, ()) is not None)
            graph, guard, constants = self.retrace(former, args, kwargs, inlined)
        data = graph_data(graph, constants)
        first = self.original_data if self.rewrites else graph_data(module.graph, module)
        for known, graph_then in [(self.first, first), *((other, other.original_data) for other in self.others)]:
            if same_graph(graph_then, data):
                return guard, known
        if len(self.others) >= _MAX_GRAPHS:
            if not self.rewrites:
                return guard, None
            self.others.pop(0)
        variant = Variant(graph, self.first.name)
        variant.original_data = data
        module._add_constants(graph, constants)
        if self.rewrites:
            twins = Twins(first or [], graph)
            for rewrite in self.rewrites:
                rewrite.redo(module, graph, twins)
            self._check_targets(graph)
        self.others.append(variant)
        return guard, variant

    def _check_targets(self, graph: fx.Graph) -> None:
        for path in (str(node.target) for node in graph.find_nodes(op="call_module")):
            if any(path == gone or path.startswith(f"{gone}.") for gone in self.removed_modules):
                what = f"the forward calls {path!r} in this call"
                raise ScheduleError(f"{what}, which was replaced together with other operations")


def with_modules(root: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return a shallow copy of ``root`` with further modules at these paths."""
    for path, module in modules.items():
        *parents, name = path.split(".")
        root = holder = shallow_copy(root)
        for parent in parents:
            holder._modules[parent] = holder = shallow_copy(holder.get_submodule(parent))
        holder._modules[name] = module
    return root


def with_removed_modules(module: GraphOwner) -> GraphOwner:
    """Return a traced module with copies of the submodules that rewrites removed, for graphs without these rewrites."""
    copied = with_modules(module, {path: meta_copy(dropped) for path, dropped in module._variants.removed_modules.items()})
    assert isinstance(copied, type(module))
    return copied


def meta_copy(module: nn.Module, memo: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """Return a copy of a module and all modules inside, with weights on the meta device.

    ``memo`` has the modules copied so far, so that a shared module stays one module.
    """
    memo = {} if memo is None else memo
    if module in memo:
        return memo[module]
    copied = memo[module] = shallow_copy(module)
    for name, weight in copied._parameters.items():
        copied._parameters[name] = weight if weight is None else nn.Parameter(_meta_tensor(weight), weight.requires_grad)
    copied._buffers.update({name: None if buffer is None else _meta_tensor(buffer) for name, buffer in copied._buffers.items()})
    copied._modules.update({name: child and meta_copy(child, memo) for name, child in copied._modules.items()})
    return copied


def _meta_tensor(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty_like(tensor, device="meta")
    except NotImplementedError:  # a tensor subclass that implements only what layers need, e.g. for quantised weights
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _restored_variants(state: dict[str, Any]) -> Variants:
    variants: Variants = object.__new__(Variants)
    vars(variants).update(state)
    return variants
