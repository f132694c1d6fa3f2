"""Choice of the tracer, hierarchical tracing, and the tracing of a schedule's module in its place."""

from __future__ import annotations

import fnmatch
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from slapo_core import Schedule, ScheduleError, TraceError, UnknownNameError, forward_signature, get_logger, split_inputs

from ..graphs.traced_module import TracedModule
from ..nodes.forward_wrapping import own_forward
from ..nodes.opaque_modules import as_original, is_opaque
from .export_tracer import trace_export
from .fx_tracer import trace_fx, tracer_class
from .value_tracer import AssignedValues, ByValues, LeafKind, Plan, trace_value

Leaf = Callable[[str, nn.Module], bool]
Leaves = str | type | Iterable[str | type] | None
"""Classes, class names or globs of paths, or one of these."""
_MAX_TRIALS = 48
"""Most candidates for synthetic inputs that are tried."""

TRACERS = ("value", "fx", "export", "pytorch", "huggingface")
"""Names of tracers. ``"pytorch"`` is ``"fx"``; ``"huggingface"`` is ``"value"``, which traces Transformers models."""


def trace_module(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    leaf: Leaf = lambda path, module: False,
    tracer: Any = None,
    concrete_args: Mapping[str, Any] | None = None,
    by_values: ByValues = "never",
    **options: Any,
) -> TracedModule:
    """Return one flat graph of a module's own forward, down to its leaves. The module is not changed.

    The placeholders of the graph are the arguments with tensors. Other arguments and sizes are part of the graph. A call that
    differs in them, in a shape, a dtype or the training mode is traced anew.

    Nodes have this ``meta``:

    - ``"val"``: a fake tensor without history.
    - ``"source"``: the model's ``file:line``.
    - ``"regions"``: see ``nodes.mode_regions``.
    - ``"mutates"``: positions, among the node's inputs, of tensors that the call changes in place.
    - ``"changes"``: paths of buffers and attributes that a module kept whole changes on itself, or reads and another changes.
    - ``"draws"``: True if the call draws random numbers.
    - ``"memory"``: equal for tensors that share memory.

    To split a graph, copy nodes with their ``meta`` without the mode nodes, and call ``write_mode_nodes`` on each part.

    Args:
        model: The module; its weights may be on the meta device.
        example_inputs: Arguments of one call, see ``split_inputs``.
        leaf: ``leaf(path, module)`` returns True to keep this module whole. Modules with hooks or a wrapped forward always are.
        tracer: As for ``trace``.
        concrete_args: Further arguments, not tensors.
        by_values: Answers to queries for values that are computed from the inputs alone, with those of the example inputs:
            ``"never"``; ``"needed"``, if the forward cannot be traced without; or ``"first"``, so that the graph is the one of
            a run on real tensors. The graph has a node ``expect`` for each answer, which fails if the answer differs.
        **options: Options of ``trace``, which is called if any is given, or if there are no example inputs.

    Raises:
        TraceError: the forward cannot be traced; names the model's source line.
        UnknownNameError: no such tracer.
    """
    if options or example_inputs is None:
        return trace(model, example_inputs=example_inputs, tracer=tracer, concrete_args=concrete_args, **options)
    check_traceable(model, tracer)
    if is_opaque(model):
        what = f"the {type(model).__name__} has hooks or a wrapped forward, which a graph would lose"
        raise TraceError(f"{what}; trace it with trace(), which keeps them around the graph")
    plan: Plan = lambda path, child: "leaf" if leaf(path, child) else "inline"  # noqa: E731
    example, concrete = split_inputs(example_inputs, model), concrete_args or {}
    if (cls := tracer_class(tracer)) is not None:
        return trace_fx(model, example, plan, concrete, cls)
    args, kwargs = example[0], {**example[1], **concrete}
    if tracer == "export":
        return trace_export(model, args, kwargs)
    return trace_value(model, args, kwargs, plan, by_values=by_values)


def check_traceable(module: nn.Module, tracer: Any) -> None:
    """Refuse a module that no tracer can trace, and an unknown tracer."""
    if tracer not in TRACERS and tracer is not None and tracer_class(tracer) is None:
        raise UnknownNameError.of("tracer", str(tracer), TRACERS)
    if own_forward(module) is not None:
        what = f"the {type(module).__name__} has been given a forward of its own, beside its class's"
        raise TraceError(f"{what}, which tracing would lose; trace what is inside it")


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
    """Return a traced module with the parameter names of the original, and its hooks and wrappers around the graph.

    Modules of ``torch.nn`` stay whole, and so do traced ones unless ``flatten``.

    Args:
        model: The model to run on the example inputs. It is not changed.
        example_inputs: Arguments of one call, see ``split_inputs``. None: ``torch.fx`` traces symbolically, or, if it cannot,
            the forward runs on ``synthetic_inputs``.
        recursive: Trace submodules too, each into a graph of its own.
        flatten: Trace everything into one graph instead.
        leaf_modules: Classes, class names or globs of paths below the traced module, to be kept whole; or one of these.
        tracer: ``"value"`` records one run on fake tensors, ``"fx"`` (or ``"pytorch"``, or a subclass of ``torch.fx.Tracer``)
            traces symbolically, ``"export"`` makes one graph by ``torch.export``. Default: ``"value"`` with example inputs,
            else ``"fx"`` if it can.
        concrete_args: Non-tensor arguments that become part of the graph, by name. ``inspect.Parameter.empty``, the default of
            a parameter without one, counts as not given.
        target: Path of the module to trace, on its arguments when ``model`` runs.
        symbolic: True to make sizes nodes of the graphs, so that one serves every batch size and sequence length.
        open_modules: Classes of ``torch.nn`` that are not kept whole.
        assigned: Treatment of values that the forward leaves in attributes, see ``session.Request``; for one graph only.

    Raises:
        TraceError: the forward cannot be traced; names the model's source line.
        ScheduleError: a leaf matches nothing in the module, or a tracer that needs example inputs has none.
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
    if (cls := tracer_class(tracer)) is not None:
        example = None if target or example_inputs is None else split_inputs(example_inputs, module)
        return trace_fx(module, example, plan, concrete_args, cls)
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
    """Return True if a module only holds others, and is never called."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def check_concrete(module: nn.Module, concrete_args: Mapping[str, Any]) -> None:
    """Raise ``TraceError`` if the forward of a module does not take such an argument by name."""
    known = [name for name, each in forward_signature(module).parameters.items() if each.kind is not each.VAR_KEYWORD]
    if unknown := concrete_args.keys() - {*known}:
        what = f"concrete_args: the forward of {type(module).__name__} takes no {min(unknown)!r}"
        raise TraceError(f"{what}; it takes {', '.join(known) or 'none'}")


def leaf_list(leaves: Leaves, primitive: str = "trace") -> list[str | type]:
    """Return the leaves as a list."""
    found = [leaves] if isinstance(leaves, (str, type)) else [] if leaves is None else list(leaves)
    if wrong := [leaf for leaf in found if not isinstance(leaf, (str, type))]:
        raise ScheduleError(f"leaf_modules: {wrong[0]!r:.60} is neither a class nor a name", primitive=primitive)
    return found


def named_leaves(module: nn.Module, leaves: Leaves, path: str = "", primitive: str = "trace") -> set[int]:
    """Return the ids of the modules inside ``module``, which is at ``path``, that the leaves match."""
    found: set[int] = set()
    inside = {path: child for path, child in module.named_modules() if path}
    for leaf in leaf_list(leaves, primitive):
        exact = inside.get(leaf) if isinstance(leaf, str) and not leaf.isidentifier() else None  # a plan may name thousands
        named = {id(exact)} if exact else {id(child) for path, child in inside.items() if _leaf_matches(leaf, path, child)}
        if not named:
            what = f"leaf_modules: {leaf!r} is neither a class nor the path of a module below"
            raise ScheduleError(what, path=path, primitive=primitive)
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


def synthetic_inputs(model: nn.Module, concrete_args: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return inputs by name with which the model runs, or None.

    These are the ``dummy_inputs`` of a Transformers model, else tensors for the arguments without default, in the shapes that
    the model's layers take. They serve only for tracing: graphs and programs are made again for calls of other shapes.

    Args:
        model: Runs on fake tensors; it is not changed.
        concrete_args: Arguments that are not inputs. If any are given for a Transformers model, its others are inputs.
    """
    concrete = concrete_args or {}
    for inputs in itertools.islice(candidate_inputs(model, concrete), _MAX_TRIALS):
        if _runs(model, {**inputs, **concrete}):
            shown = ", ".join(f"{name} {list(value.shape)} {value.dtype}" for name, value in inputs.items())
            get_logger().info("no example_inputs: %s is traced with %s", type(model).__name__, shown)
            return inputs
    return None


def _runs(model: nn.Module, inputs: dict[str, Any]) -> bool:
    try:
        trace_module(model, inputs, leaf=lambda path, module: True)
    except TraceError as err:
        get_logger().debug("no stand-ins: %s", err)
        return False
    return True


_LENGTH = 8
_TOKEN_SHAPED = dict.fromkeys(("attention_mask", "decoder_attention_mask"), 1) | dict.fromkeys(("token_type_ids", "labels"), 0)
"""Arguments with the shape of the tokens, and a value for each."""


def candidate_inputs(model: nn.Module, concrete: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield inputs by name that may fit the model: its ``dummy_inputs``, then tensors in the shapes that its layers take."""
    parameters = {name: each for name, each in forward_signature(model).parameters.items() if name not in concrete}
    own = _dummy_inputs(model)
    found = {name: value for name, value in own.items() if name in parameters} if isinstance(own, Mapping) else {}
    if concrete and isinstance(tokens := found.get("input_ids"), torch.Tensor):
        found = {name: torch.full_like(tokens, value) for name, value in _TOKEN_SHAPED.items() if name in parameters} | found
    if found:
        yield found
    named = [each for each in parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    names = [each.name for each in named if each.default is each.empty] or [each.name for each in named[:1]]
    device = next((tensor.device for tensor in model.parameters() if not tensor.is_meta), torch.device("cpu"))
    values = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype in dict.fromkeys(_layer_input_shapes(model))]
    alike = [(value,) * len(names) for value in values]
    mixed = itertools.product(values[:4], repeat=len(names)) if len(names) < 4 else ()
    yield from (dict(zip(names, each, strict=True)) for each in [*alike, *mixed] if each)


def _dummy_inputs(model: nn.Module) -> Any:
    try:
        return getattr(as_original(model), "dummy_inputs", None)
    except Exception as err:  # a property of a stranger's, for another configuration
        get_logger().debug("dummy_inputs: %s", err)
        return None


def _layer_input_shapes(model: nn.Module) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    """Yield shapes and dtypes of the layers' inputs, in module order, then those that fit parameters."""
    default = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.get_default_dtype())
    image = getattr(getattr(model, "config", None), "image_size", None)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield (2, _LENGTH), torch.long
        elif (channels := _size_attribute(module, ("in_channels", "num_features"))) is not None:
            dims = next((dims for dims in (1, 2, 3) if f"{dims}d" in type(module).__name__.lower()), 2)
            for size in [image] if type(image) is int else (32, 224):
                yield (2, channels, *(size,) * dims), default
            yield (2, channels), default
        elif (width := _size_attribute(module, ("in_features", "input_size", "embed_dim", "d_model", "nx"))) is not None:
            yield (2, width), default
            yield (2, _LENGTH, width), default
    for parameter in model.parameters():
        for width in (*parameter.shape[-1:], *parameter.shape[:1]):
            yield (2, width), default
            yield (2, _LENGTH, width), default


def _size_attribute(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """Return the first of these attributes that is an integer, or None."""
    return next((value for name in names if type(value := getattr(module, name, None)) is int), None)


def trace_in_place(schedule: Schedule, example_inputs: Any, **options: Any) -> Any:
    """Trace the schedule's module on its own inputs; None uses its arguments when the model runs on the schedule's inputs.

    The first inputs for the whole model become the schedule's example inputs.
    """
    if not schedule.path and schedule.example_inputs is None and example_inputs is not None:
        schedule.example_inputs = example_inputs
    if example_inputs is not None or tracer_class(options.get("tracer")) is not None and schedule.path:
        return trace(schedule.mod, example_inputs=example_inputs, **options)
    return trace(schedule.root_module, example_inputs=schedule.example_inputs, target=schedule.path, **options)


def put_in_place(schedule: Schedule, traced: nn.Module) -> None:
    """Put a traced module in the schedule's place, and carry over the metadata of each module."""
    before = dict(schedule.mod.named_modules())
    schedule.replace_module(traced)
    for path, module in traced.named_modules():
        if path in before:
            schedule.share_metadata(before[path], module)
