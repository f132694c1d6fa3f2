"""The tracers behind one function, and hierarchical tracing on top of them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx, nn

from ..errors import ScheduleError, TraceError, UnknownNameError
from ..inputs import split_inputs
from ..wrapping import is_opaque
from .exported import trace_export
from .guard import Guard
from .traced_module import TracedModule
from .value import Plan, trace_value

Leaf = Callable[[str, nn.Module], bool]
TRACERS = ("value", "fx", "export")


def trace_module(
    model: nn.Module,
    example_inputs: Any,
    *,
    leaf: Leaf = lambda path, module: False,
    tracer: str = "value",
    concrete_args: Mapping[str, Any] | None = None,
) -> TracedModule:
    """One flat graph of a module's own forward, down to its leaves. The module is left as it is.

    The graph's placeholders are the arguments given that hold tensors; everything else the forward was given is part of the
    graph, and a call that differs in it, in a shape, a dtype or the training mode is a ``TraceError``. Nodes have
    ``meta["val"]``: a fake tensor without history, ``meta["source"]``: the model's ``file:line``, ``meta["regions"]``: see
    ``tracing.regions``, ``meta["mutates"]`` where a call changes tensors in place: their places among the node's inputs, and
    ``meta["changes"]``: paths of buffers and attributes a module kept whole changes on itself, or reads and another changes;
    ``meta["draws"]``: whether a call draws random numbers; ``meta["memory"]``: equal for tensors that share memory. To split a
    graph, copy nodes with their ``meta``, leave out region nodes and call ``regions.write_regions`` on each part.

    Args:
        model: What to trace; its weights may be on the meta device.
        example_inputs: One call's arguments, see ``slapo_core.inputs.split_inputs``.
        leaf: ``leaf(path, module)``: keep this module whole. Modules with hooks or a wrapped forward always are.
        tracer: ``"value"`` records one run on fake tensors; ``"fx"`` traces symbolically; ``"export"`` uses
            ``torch.export``, which ignores ``leaf``.
        concrete_args: Further arguments, no tensors.

    Raises:
        TraceError: The forward cannot be traced; names the model's source line.
        UnknownNameError: No such tracer.
    """
    check_traceable(model, tracer)
    args, kwargs = split_inputs(example_inputs, model)
    kwargs = {**kwargs, **(concrete_args or {})}
    if tracer == "fx":
        return _trace_fx(model, args, kwargs, leaf)
    if tracer == "export":
        return trace_export(model, args, kwargs)
    return trace_value(model, args, kwargs, lambda path, child: "leaf" if leaf(path, child) else "inline")


def check_traceable(module: nn.Module, tracer: str) -> None:
    """Refuse what no tracer can do."""
    if tracer not in TRACERS:
        raise UnknownNameError.of("tracer", tracer, TRACERS)
    if is_opaque(module):
        what = f"the {type(module).__name__} has hooks or a wrapped forward, which a graph would lose"
        raise TraceError(f"{what}; trace it before, or trace what is inside it")


class _FxTracer(fx.Tracer):
    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.leaf = leaf

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_opaque(m) or self.leaf(module_qualified_name, m)


def _trace_fx(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], leaf: Leaf) -> TracedModule:
    guard = Guard.of(module, args, kwargs)
    values = guard.values(args, kwargs)
    concrete = {name: value for name, value in values.items() if name not in guard.placeholders}
    try:
        graph = _FxTracer(leaf).trace(module, concrete)
    except Exception as err:  # symbolic values may break any code
        raise TraceError(f"tracer 'fx' cannot trace {type(module).__name__}: {err}; use tracer='value'") from err
    for node in list(graph.find_nodes(op="placeholder")):
        if str(node.target) not in guard.placeholders and not node.users:
            graph.erase_node(node)
    return TracedModule(module, graph, guard)


# -- hierarchical tracing


def trace(
    model: nn.Module,
    *,
    example_inputs: Any = None,
    recursive: bool = True,
    flatten: bool = False,
    leaf_modules: Iterable[str | type] | None = None,
    tracer: str = "value",
    concrete_args: Mapping[str, Any] | None = None,
    target: str = "",
) -> TracedModule:
    """A traced module with the parameter names of the original.

    Modules of ``torch.nn`` stay whole, and those already traced.

    Args:
        model: What runs on the example inputs. It is left as it is.
        example_inputs: One call's arguments, see ``slapo_core.inputs.split_inputs``.
        recursive: Submodules are traced too, each into a graph of its own.
        flatten: One graph of everything instead.
        leaf_modules: Classes, class names or globs of paths below the traced module, to be kept whole.
        tracer: ``"value"``, ``"fx"`` or ``"export"``; the latter two make one graph, of ``model`` itself.
        concrete_args: Further arguments, no tensors.
        target: Path of the module to trace, with the inputs it gets when ``model`` runs.

    Raises:
        TraceError: The forward cannot be traced; names the model's source line.
        ScheduleError: No example inputs, or a leaf that is nowhere in the module.
    """
    if example_inputs is None:
        raise ScheduleError(
            "tracing runs the model once: give example_inputs, here or to create_schedule", path=target, primitive="trace"
        )
    module = model.get_submodule(target)
    check_traceable(module, tracer)
    kept = named_leaves(module, leaf_modules or ())

    def is_leaf(child: nn.Module) -> bool:
        return isinstance(child, fx.GraphModule) or id(child) in kept or _is_torch_module(child)

    plan: Plan = lambda path, child: "leaf" if is_leaf(child) else "inline" if flatten else "graph" if recursive else "leaf"  # noqa: E731
    if tracer != "value":
        if target:
            raise ScheduleError(
                f"tracer {tracer!r} needs the example_inputs of the module itself", path=target, primitive="trace"
            )
        leaf: Leaf = lambda path, child: plan(path, child) == "leaf"  # noqa: E731
        return trace_module(module, example_inputs, leaf=leaf, tracer=tracer, concrete_args=concrete_args)
    args, kwargs = split_inputs(example_inputs, model)
    return trace_value(model, args, {**kwargs, **(concrete_args or {})}, plan, target)


def named_leaves(module: nn.Module, leaves: Iterable[str | type]) -> set[int]:
    """Ids of the modules inside ``module`` that the leaves name."""
    found: set[int] = set()
    inside = [(path, child) for path, child in module.named_modules() if path]
    for leaf in leaves:
        named = {id(child) for path, child in inside if _names(leaf, path, child)}
        if not named:
            raise ScheduleError(f"leaf_modules: {leaf!r} is no class and no path of a module below", primitive="trace")
        found |= named
    return found


def _names(leaf: str | type, path: str, module: nn.Module) -> bool:
    if isinstance(leaf, type):
        return isinstance(module, leaf)
    same_depth = leaf.count(".") == path.count(".")
    return leaf == type(module).__name__ or (same_depth and fnmatch.fnmatchcase(path, leaf))


def _is_torch_module(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)
