"""The tracers behind one function, and hierarchical tracing on top of them."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx, nn

from slapo_core import ScheduleError, TraceError, UnknownNameError, forward_signature, split_inputs

from ..graphs.traced_module import TracedModule
from ..nodes.forward_wrapping import own_forward
from ..nodes.opaque_modules import is_opaque
from .export_tracer import trace_export
from .fx_tracer import trace_fx, tracer_class
from .synthetic_inputs import synthetic_inputs
from .value_tracer import AssignedValues, LeafKind, Plan, trace_value

Leaf = Callable[[str, nn.Module], bool]
Leaves = str | type | Iterable[str | type] | None
"""Classes, class names or globs of paths, or one of these."""
TRACERS = ("value", "fx", "export", "pytorch", "huggingface")
"""``"pytorch"`` is another name of ``"fx"``, ``"huggingface"`` one of ``"value"``, which traces the models of Transformers."""


def trace_module(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    leaf: Leaf = lambda path, module: False,
    tracer: Any = None,
    concrete_args: Mapping[str, Any] | None = None,
    by_values: bool = False,
    **options: Any,
) -> TracedModule:
    """One flat graph of a module's own forward, down to its leaves. The module is left as it is.

    The graph's placeholders are the arguments given that hold tensors; everything else the forward was given is part of the
    graph, as are the sizes. A call that differs in it, in a shape, a dtype or the training mode is traced anew. Nodes have
    ``meta["val"]``: a fake tensor without history, ``meta["source"]``: the model's ``file:line``, ``meta["regions"]``: see
    ``tracing.regions``, ``meta["mutates"]`` where a call changes tensors in place: their places among the node's inputs, and
    ``meta["changes"]``: paths of buffers and attributes a module kept whole changes on itself, or reads and another changes;
    ``meta["draws"]``: whether a call draws random numbers; ``meta["memory"]``: equal for tensors that share memory. To split a
    graph, copy nodes with their ``meta``, leave out region nodes and call ``regions.write_regions`` on each part.

    Args:
        model: What to trace; its weights may be on the meta device.
        example_inputs: One call's arguments, see ``split_inputs``.
        leaf: ``leaf(path, module)``: keep this module whole. Modules with hooks or a wrapped forward always are.
        tracer: See ``trace``.
        concrete_args: Further arguments, no tensors.
        by_values: Answer a forward that asks for values of its inputs, or what is computed from them alone, by those of the
            example inputs. The graph has a node ``expect`` for each answer, which fails where it is another one.
        **options: Those of ``trace``, which is called where any is given, or no example inputs.

    Raises:
        TraceError: The forward cannot be traced; names the model's source line.
        UnknownNameError: No such tracer.
    """
    if options or example_inputs is None:
        return trace(model, example_inputs=example_inputs, tracer=tracer, concrete_args=concrete_args, **options)
    check_traceable(model, tracer)
    if is_opaque(model):
        what = f"the {type(model).__name__} has hooks or a wrapped forward, which a graph would lose"
        raise TraceError(f"{what}; trace it with trace(), which keeps them around the graph")
    plan: Plan = lambda path, child: "leaf" if leaf(path, child) else "inline"  # noqa: E731
    return _trace_flat(model, split_inputs(example_inputs, model), plan, tracer, concrete_args or {}, by_values=by_values)


def check_traceable(module: nn.Module, tracer: Any) -> None:
    """Refuse what no tracer can do."""
    if tracer not in TRACERS and tracer is not None and tracer_class(tracer) is None:
        raise UnknownNameError.of("tracer", str(tracer), TRACERS)
    if own_forward(module) is not None:
        what = f"the {type(module).__name__} has been given a forward of its own, beside its class's"
        raise TraceError(f"{what}, which tracing would lose; trace what is inside it")


def _trace_flat(
    module: nn.Module,
    example: Any,
    plan: Plan,
    tracer: Any,
    concrete: Mapping[str, Any],
    symbolic: bool = False,
    by_values: bool = False,
) -> TracedModule:
    if (cls := tracer_class(tracer)) is not None:
        return trace_fx(module, example, plan, concrete, cls)
    args, kwargs = example
    kwargs = {**kwargs, **concrete}
    if tracer == "export":
        return trace_export(module, args, kwargs)
    return trace_value(module, args, kwargs, plan, symbolic=symbolic, by_values=by_values)


# -- hierarchical tracing


def trace(
    model: nn.Module,
    *,
    example_inputs: Any = None,
    recursive: bool = True,
    flatten: bool = False,
    leaf_modules: Leaves = None,
    tracer: Any = None,
    concrete_args: Mapping[str, Any] | None = None,
    target: str = "",
    symbolic: bool = True,
    open_modules: tuple[type[nn.Module], ...] = (),
    assigned: AssignedValues = "refused",
) -> TracedModule:
    """A traced module with the parameter names of the original, its hooks and wrappers around the graph.

    Modules of ``torch.nn`` stay whole, and, unless everything is to be one graph, those already traced.

    Args:
        model: What runs on the example inputs. It is left as it is.
        example_inputs: One call's arguments, see ``split_inputs``; None: ``torch.fx`` traces symbolically,
            or, where it cannot, the forward is run on ``synthetic_inputs``.
        recursive: Submodules are traced too, each into a graph of its own.
        flatten: One graph of everything instead.
        leaf_modules: Classes, class names or globs of paths below the traced module, to be kept whole; or one of these.
        tracer: ``"value"`` records one run on fake tensors, ``"fx"`` (or ``"pytorch"``, or a subclass of ``torch.fx.Tracer``)
            traces symbolically, ``"export"`` makes one graph by ``torch.export``. Default: ``"value"`` where there are example
            inputs, else ``"fx"`` where it can.
        concrete_args: Arguments that are no tensors, and part of the graph, by name. ``inspect.Parameter.empty``, the default
            of a parameter that has none, counts as not given.
        target: Path of the module to trace, with the inputs it gets when ``model`` runs.
        symbolic: Sizes are nodes of the graphs, so that one serves every batch and sequence length.
        open_modules: Classes of ``torch.nn`` that are not kept whole.
        assigned: What becomes of values that the forward leaves in attributes, see ``value.Request``; of one graph alone.

    Raises:
        TraceError: The forward cannot be traced; names the model's source line.
        ScheduleError: A leaf that is nowhere in the module, or a tracer that needs example inputs and has none.
    """
    if not isinstance(model, nn.Module):
        raise TraceError(f"{model!r:.60} cannot be traced; give an nn.Module")
    module = model.get_submodule(target)
    check_traceable(module, tracer)
    kept = named_leaves(module, leaf_modules, target)
    concrete_args = {name: value for name, value in (concrete_args or {}).items() if value is not inspect.Parameter.empty}
    check_concrete(module, concrete_args)

    def plan(path: str, child: nn.Module) -> LeafKind:
        whole = _is_torch_module(child) and not isinstance(child, open_modules)
        if id(child) in kept or whole or (isinstance(child, fx.GraphModule) and not flatten):
            return "leaf"
        return "inline" if flatten else "graph" if recursive else "leaf"

    given = {} if target else concrete_args
    if tracer is None and example_inputs is None:
        try:
            return trace_fx(module, None, plan, concrete_args)
        except TraceError:
            if (example_inputs := synthetic_inputs(model, given)) is None:
                raise
    tracer = tracer or "value"
    if tracer_class(tracer) is not None:
        example = None if target or example_inputs is None else split_inputs(example_inputs, module)
        return _trace_flat(module, example, plan, tracer, concrete_args)
    example_inputs = synthetic_inputs(model, given) if example_inputs is None else example_inputs
    if example_inputs is None or (target and tracer == "export"):
        what = f"tracer {tracer!r} runs the module; give its example_inputs"
        raise ScheduleError(f"{what}, here or to create_schedule", path=target, primitive="trace")
    args, kwargs = split_inputs(example_inputs, model)
    kwargs = {**kwargs, **given}
    if tracer == "export":
        return trace_export(module, args, kwargs)
    return trace_value(model, args, kwargs, plan, target, symbolic, assigned=assigned)


def is_container(module: nn.Module) -> bool:
    """Return whether a module only holds others, and is never called."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def check_concrete(module: nn.Module, concrete_args: Mapping[str, Any]) -> None:
    """Raise ``TraceError`` where the forward of a module takes no such argument by name."""
    known = [name for name, each in forward_signature(module).parameters.items() if each.kind is not each.VAR_KEYWORD]
    if unknown := concrete_args.keys() - {*known}:
        what = f"concrete_args: the forward of {type(module).__name__} takes no {min(unknown)!r}"
        raise TraceError(f"{what}; it takes {', '.join(known) or 'none'}")


def leaf_list(leaves: Leaves, primitive: str = "trace") -> list[str | type]:
    """The leaves one by one."""
    found = [leaves] if isinstance(leaves, (str, type)) else [] if leaves is None else list(leaves)
    if wrong := [leaf for leaf in found if not isinstance(leaf, (str, type))]:
        raise ScheduleError(f"leaf_modules: {wrong[0]!r:.60} is neither a class nor a name", primitive=primitive)
    return found


def named_leaves(module: nn.Module, leaves: Leaves, path: str = "", primitive: str = "trace") -> set[int]:
    """Ids of the modules inside ``module``, which is at ``path``, that the leaves name."""
    found: set[int] = set()
    inside = {path: child for path, child in module.named_modules() if path}
    for leaf in leaf_list(leaves, primitive):
        exact = inside.get(leaf) if isinstance(leaf, str) and not leaf.isidentifier() else None  # a plan may name thousands
        named = {id(exact)} if exact else {id(child) for path, child in inside.items() if _leaf_matches(leaf, path, child)}
        if not named:
            raise ScheduleError(
                f"leaf_modules: {leaf!r} is no class and no path of a module below", path=path, primitive=primitive
            )
        found |= named
    return found


def _leaf_matches(leaf: str | type, path: str, module: nn.Module) -> bool:
    if isinstance(leaf, type):
        return isinstance(module, leaf)
    same_depth = leaf.count(".") == path.count(".")
    return leaf == type(module).__name__ or (same_depth and fnmatch.fnmatchcase(path, leaf))


def _is_torch_module(module: nn.Module) -> bool:
    layers = ("torch.nn.", "transformers.pytorch_utils")  # the latter has GPT-2's Conv1D, a Linear by another name
    return type(module).__module__.startswith(layers) and not isinstance(module, nn.Sequential)
