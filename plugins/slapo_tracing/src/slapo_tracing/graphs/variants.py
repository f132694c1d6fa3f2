"""The graphs of one traced module: each serves the calls whose own trace gave that graph.

A call unlike those before, with another shape, ``None`` for a tensor, another dtype or mode, is traced once. Where its graph
is one that is there already, as sizes are nodes of the graph, that one serves it too; else its graph is kept beside the others,
with the same rewrites. What cannot be traced runs the module's own forward, where no rewrite would be lost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from slapo_core import ScheduleError, TraceError, get_logger

from ..nodes import _torch_private as private
from ..nodes import mode_regions
from ..nodes.codegen import compile_graph
from ..nodes.graph_comparison import Twins, graph_data, same_graph
from ..nodes.nested_values import Hidden, shallow_copy
from ..nodes.opaque_modules import is_opaque
from ..recording.attribute_reads import inside
from ..recording.module_hooks import is_hooked
from ..recording.sandbox import Sandbox
from .guard import Call, Guard, InputCheck, device_of

if TYPE_CHECKING:
    from .traced_module import TracedModule

_MOST_GRAPHS = 32
_MOST_CALLS = 256


class Rewrite(Protocol):
    """An edit of the first graph that can be made on another one."""

    call: Any
    """The call that replaced the nodes, with its ``op`` and ``target``."""

    def redo(self, module: TracedModule, graph: fx.Graph, twins: Twins) -> None:
        """Make the edit on ``graph``, where ``twins`` has its node for the name of each node of the first graph."""


class Retrace(Protocol):
    """The tracer that makes the graph of another call."""

    def __call__(
        self, module: nn.Module, args: Any, kwargs: Any, opened: frozenset[str], /
    ) -> tuple[fx.Graph, Guard, dict[str, Any]]:
        """Return the graph of a call of ``module``, its guard, and the tensors it holds; ``opened`` are the modules inlined."""


_SAME = ("as before",)


class Opened(NamedTuple):
    """A module whose forward is part of the graphs.

    Attributes:
        cls: Its class.
        hooks: Its hooks, which are recorded with the forward.
    """

    cls: type
    hooks: tuple[Any, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Opened:
        """A module as it is now."""
        return cls(type(module), _hooks_of(module) if is_hooked(module) else ())

    def now(self, root: nn.Module, path: str) -> tuple[Any, ...] | None:
        """The module's hooks, where they are recorded and others; None where it is to be called whole; else ``_SAME``."""
        module = inside(root, path.split("."))
        if module is None or type(module) is not self.cls:
            return None
        hooked = is_hooked(module)
        if ("forward" in module.__dict__ or hooked) and is_opaque(module, inlined=True):
            return None
        hooks = _hooks_of(module) if hooked else ()
        return _SAME if hooks == self.hooks else hooks


def _held_at(root: nn.Module, places: Sequence[tuple[str, ...]]) -> set[int]:
    """Ids of what is at these places now."""
    found: set[int] = set()
    for *path, name in places:
        module = inside(root, path)
        for table in (module._modules, module._parameters, module._buffers) if module is not None else ():
            if table.get(name) is not None:
                found.add(id(table[name]))
    return found


def _hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """Its hooks, but for those that are there for one trace."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return tuple(hook for hook in hooks if not getattr(hook, "of_trace", False))


class Variant(Hidden):
    """One graph of a traced module, compiled when first run.

    Args:
        graph: The graph.
        name: Of the module, for tracebacks.
    """

    def __init__(self, graph: fx.Graph, name: str) -> None:
        self.graph, self.name = graph, name
        self.function: Callable[..., Any] | None = None
        self.source = ""
        self.switches = False
        """Whether the graph switches gradients or autocast."""
        self.pristine: list[Any] | None = None

    def run(self, module: TracedModule, inputs: Mapping[str, Any], args: Sequence[Any] = ()) -> Any:
        """Run the graph on the traced module, through what it puts between."""
        return self._call(module.through(self.compile()), module, inputs, args)

    def run_on(self, module: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Run the graph on another module that holds what its targets name."""
        return self._call(self.compile(), module, inputs)

    def _call(
        self, function: Callable[..., Any], module: nn.Module, inputs: Mapping[str, Any], args: Sequence[Any] = ()
    ) -> Any:
        """Call the function of the graph; gradients and autocast are switched afterwards as before, whatever it raises."""
        before = mode_regions.current_modes() if self.switches else None
        try:
            return function(module, *args, **inputs)
        finally:
            if before is not None and mode_regions.current_modes() != before:  # an error inside a region
                mode_regions.leave_modes(before)

    def compile(self) -> Callable[..., Any]:
        """The function of the graph, which is made where it is not there."""
        if self.function is None:
            self.function, self.source = compile_graph(self.graph, self.name)
            self.switches = any(map(mode_regions.is_mode_node, self.graph.nodes))
        return self.function

    @property
    def code(self) -> str:
        """The Python code of the graph."""
        return self.source or compile_graph(self.graph, self.name)[1]

    def follow(self, guard: Guard | InputCheck, inputs: Mapping[str, Any]) -> None:
        """The graph says where the forward made tensors: where its inputs were. They may be on another device now."""
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
        guard: The calls that the first graph is good for; None: any, whose arguments go to the placeholders.
        opened: The modules whose forwards are part of the graph, by path; None: no other call can be traced.
        inner: The rewritten module that was traced, without what it runs on; None: the class's own forward was.
        retrace: Traces other calls; needed where ``opened`` is given.
    """

    def __init__(
        self,
        graph: fx.Graph,
        label: str,
        guard: Guard | InputCheck | None,
        opened: Mapping[str, Opened] | None,
        inner: TracedModule | None,
        retrace: Retrace | None,
    ) -> None:
        self.label, self.opened, self.inner, self.retrace = label, opened, inner, retrace
        self.shared: list[list[tuple[str, ...]]] = []
        """The places of what the first graph names by one of them, and the traced module has at several."""
        self.guard = guard if isinstance(guard, Guard) else None
        self.input_check = None if isinstance(guard, Guard) else guard
        self.rewrites: list[Rewrite] = []
        self.dropped: dict[str, nn.Module] = {}
        """Submodules that rewrites removed, by path, on the meta device: what they compute is traced, and rewritten again."""
        self.edited_by_hand = False
        self.pristine: list[Any] | None = None
        """The first graph before the first rewrite."""
        self.start_from(graph)

    def start_from(self, graph: fx.Graph, rewritten: bool = False) -> None:
        """Take this for the first graph, which is not compiled yet, and drop all others."""
        if rewritten and self.guard is not None and self.guard.attributes is not None:
            self.guard.attributes.is_rewritten = True
        self.first = Variant(graph, f"Traced{self.label}")
        self.others: list[Variant] = []
        self.calls: dict[Any, list[tuple[Guard, Variant | None]]] = {}
        self.recent: tuple[Guard, Variant | None] | None = None

    def begin_rewrite(self, module: fx.GraphModule) -> None:
        """The first graph is about to be rewritten."""
        if not self.rewrites and self.pristine is None:
            self.pristine = graph_data(module.graph, module)

    @property
    def is_changed(self) -> bool:
        """Whether the first graph is another one than was given."""
        return bool(self.rewrites) or self.edited_by_hand

    @property
    def is_rewritten(self) -> bool:
        """Whether the first graph does other things than the forward that was traced, or stands for none."""
        return self.is_changed or self.guard is None

    # made with its whole state, not filled later: what rewrites hold leads back to modules that need it when they are restored

    def __deepcopy__(self, memo: dict[int, Any]) -> Variants:
        return _restored({key: copy.deepcopy(value, memo) for key, value in self._state().items()})

    def __reduce__(self) -> Any:
        return _restored, (self._state(),)

    def _state(self) -> dict[str, Any]:
        """All but the graphs: the module has the first, and others are traced again."""
        return {key: value for key, value in vars(self).items() if key not in ("first", "others", "calls", "recent")}

    # ---- a call

    def __call__(self, module: TracedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call."""
        if self.guard is None:
            args, kwargs = self._checked(module, args, kwargs)
            return self.first.run(module, kwargs, args)
        resolve = self._resolve_uncompiled if torch.compiler.is_compiling() else self.resolve
        return resolve(module, args, kwargs)[0]()

    def graph_for(self, module: TracedModule, args: Any, kwargs: Any) -> tuple[fx.Graph, dict[str, Any], list[tuple[str, str]]]:
        """The graph of a call, its inputs, and path and name of the attributes that it depends on."""
        if self.guard is None:
            args, kwargs = self._checked(module, args, kwargs)
            placeholders = [str(node.target) for node in self.first.graph.find_nodes(op="placeholder")]
            return self.first.graph, {**dict(zip(placeholders, args, strict=False)), **kwargs}, []
        forward, variant, guard = self.resolve(module, args, kwargs)
        assert variant is not None
        assert guard is not None
        return variant.graph, forward.args[1], guard.attributes.names if guard.attributes is not None else []

    def opened_in(self, graph: fx.Graph) -> list[str]:
        """Return the paths of the modules whose forwards are part of one of the graphs."""
        called = {str(node.target) for node in graph.find_nodes(op="call_module")}
        return [path for path in self.opened or () if path not in called]

    def resolve(self, module: TracedModule, args: Any, kwargs: Any) -> tuple[partial[Any], Variant | None, Guard | None]:
        """Return what runs a call: a graph, with its guard, or the forward that was traced.

        Raises:
            TraceError: the graph was rewritten, and the rewrites cannot be made on the graph of this call; or an attribute
                was set on the module that was traced, in whose place this one is.
        """
        assert self.guard is not None
        if self.guard.attributes is not None:
            self.guard.attributes.check_original(module)
        call = Call(self.guard.parameters, module, args, kwargs)
        call.changed = self._changed(module)
        known = (self.guard, None) if Sandbox.open_now and not self.is_rewritten else None
        guard, variant = self._find(module, call) or known or self._add(module, call, args, kwargs)
        if variant is None or (guard.asks_inside and not self.is_rewritten):
            return partial(self.original(module), *args, **kwargs), None, None
        inputs = {name: call.values[name] for name in guard.placeholders}
        variant.follow(guard, inputs)
        variant.compile()
        return partial(variant.run, module, inputs), variant, guard

    _resolve_uncompiled = private.not_compiled(resolve)

    def _checked(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.input_check is None:
            return args, kwargs
        inputs = self.input_check.check(module, args, kwargs)
        self.first.follow(self.input_check, inputs)
        return (), inputs

    def original(self, module: TracedModule) -> Callable[..., Any]:
        """The forward that was traced, on the attributes, parameters and submodules that the module has now."""
        view = self.former(module)
        return MethodType(type(view).forward, view)

    def former(self, module: TracedModule, bare: bool = False) -> nn.Module:
        """See ``traced_module.former``."""
        from .traced_module import former  # noqa: PLC0415  it holds this class

        return former(module, bare)

    def _find(self, module: TracedModule, call: Call) -> tuple[Guard, Variant | None] | None:
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

    def _changed(self, module: TracedModule) -> dict[str, tuple[Any, ...] | None]:
        """The modules whose forwards are part of the graphs, and whose calls are other ones now: with these hooks, or whole."""
        now = {path: opened.now(module, path) for path, opened in self.opened.items()} if self.opened else {}
        changed = {path: hooks for path, hooks in now.items() if hooks is not _SAME}
        changed.update((".".join(places[0]), ()) for places in self.shared if len(_held_at(module, places)) > 1)
        return changed

    def _add(self, module: TracedModule, call: Call, args: Any, kwargs: Any) -> tuple[Guard, Variant | None]:
        try:
            guard, variant = self._traced(module, args, kwargs, call.changed)
            if asked := next(filter(None, (each.problem(call.values) for each in guard.expectations)), None):
                raise TraceError(asked)  # fake tensors have not all facts of real ones
        except Exception as err:  # a transform of torch.func, say, lets fake tensors do less
            if self.is_rewritten:
                changed = next(
                    (f"{path!r} was wrapped, got hooks, or was replaced, here or at another place" for path in call.changed),
                    None,
                )
                problem = changed or (self.guard and self.guard.problem(module, call))
                raise TraceError(f"{problem}, and the rewritten graph of the {self.label} has no other form: {err}") from err
            get_logger().warning("the traced %s runs its own forward for calls like this, no graph: %s", self.label, err)
            guard, variant = Guard.of(module, args, kwargs), None
        guard.share_attributes(self.guard, module)
        if len(self.calls) >= _MOST_CALLS:
            self.calls.clear()
        self.recent = None if call.changed else (guard, variant)
        self.calls.setdefault(call.key, []).insert(0, (guard, variant))
        del self.calls[call.key][_MOST_GRAPHS:]
        return guard, variant

    def _traced(self, module: TracedModule, args: Any, kwargs: Any, changed: Mapping[str, Any]) -> tuple[Guard, Variant | None]:
        if self.edited_by_hand:
            raise TraceError(
                "it was edited by hand, which cannot be repeated; use replace or fuse, or run calls like the first"
            )
        if self.opened is None or self.retrace is None:
            raise TraceError("the class that it was traced from is not known")
        with private.unobserved():
            former = with_modules(self.former(module, bare=True), self.dropped)
            opened = frozenset(path for path in self.opened if changed.get(path, ()) is not None)
            graph, guard, constants = self.retrace(former, args, kwargs, opened)
        data = graph_data(graph, constants)
        first = self.pristine if self.rewrites else graph_data(module.graph, module)
        for known, graph_then in [(self.first, first), *((other, other.pristine) for other in self.others)]:
            if same_graph(graph_then, data):
                return guard, known
        if len(self.others) >= _MOST_GRAPHS:
            if not self.rewrites:
                return guard, None
            self.others.pop(0)
        variant = Variant(graph, self.first.name)
        variant.pristine = data
        module._add_constants(graph, constants)
        if self.rewrites:
            twins = Twins(first or [], graph)
            for rewrite in self.rewrites:
                rewrite.redo(module, graph, twins)
            self._check_targets(graph)
        self.others.append(variant)
        return guard, variant

    def _check_targets(self, graph: fx.Graph) -> None:
        called = [str(node.target) for node in graph.find_nodes(op="call_module")]
        if lost := [path for path in called if any(path == gone or path.startswith(f"{gone}.") for gone in self.dropped)]:
            raise ScheduleError(
                f"the forward calls {lost[0]!r} in this call, which was replaced together with other operations"
            )


def with_modules(root: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """A shallow copy of ``root`` in which further modules are at these paths."""
    for path, module in modules.items():
        *parents, name = path.split(".")
        root = holder = shallow_copy(root)
        for parent in parents:
            holder._modules[parent] = holder = shallow_copy(holder.get_submodule(parent))
        holder._modules[name] = module
    return root


def with_dropped(module: TracedModule) -> TracedModule:
    """A traced module that has copies of the submodules that rewrites removed, which graphs without these rewrites call."""
    copied = with_modules(module, {path: meta_copy(dropped) for path, dropped in module._variants.dropped.items()})
    assert isinstance(copied, type(module))
    return copied


def meta_copy(module: nn.Module, memo: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """Return a copy of a module and all in it, with weights on the meta device.

    Args:
        module: The module.
        memo: Modules copied so far: one that has two names is one module still.
    """
    memo = {} if memo is None else memo
    if module in memo:
        return memo[module]
    copied = memo[module] = shallow_copy(module)
    for name, weight in copied._parameters.items():
        copied._parameters[name] = weight if weight is None else nn.Parameter(_empty(weight), weight.requires_grad)
    copied._buffers.update({name: None if buffer is None else _empty(buffer) for name, buffer in copied._buffers.items()})
    copied._modules.update({name: child and meta_copy(child, memo) for name, child in copied._modules.items()})
    return copied


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty_like(tensor, device="meta")
    except NotImplementedError:  # of a subclass that knows only what layers ask of it, as those of quantised weights
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _restored(state: dict[str, Any]) -> Variants:
    variants: Variants = object.__new__(Variants)
    vars(variants).update(state)
    return variants
