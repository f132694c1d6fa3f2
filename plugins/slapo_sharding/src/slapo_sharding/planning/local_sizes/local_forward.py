"""Forward of a module with sharded layers, from graphs of the whole module with local sizes."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from slapo_core import TraceError, is_sharded, split_inputs
from slapo_tracing.graphs import Call, Guard, Variant, meta_copy, plain_signature
from slapo_tracing.nodes import Hidden, whole_shape, without_observers
from slapo_tracing.recording import HOOK_ATTRIBUTES, WRAPPER_ATTRIBUTES
from slapo_tracing.tracers import LeafKind, trace_again, trace_value

from ...communication._torch_private import fake_mesh
from ...communication.collectives import Group
from ...rules.parametrizations import no_parametrization_in_forward
from ..dry_run.layout_records import LayoutError
from ..dry_run.layouts import Layouts
from ..dry_run.parallel_branches import Branches, find_branches
from ..dry_run.sharded_fills import ShardedFill, fills_to_shard
from ..dry_run.size_arguments import leaves
from ..dry_run.split_specs import LayerSplit, ParameterSplit
from .graph_division import divide_graph, without_prototypes
from .size_origins import strip_origins

_MAX_CALLS, _MAX_GRAPHS = 256, 8
_KEPT_ATTRIBUTES = {*vars(nn.Module()), *WRAPPER_ATTRIBUTES} - {"training"}
"""Attributes that the copy with whole layers keeps when it is updated from the module, and the reverse."""


GraphCache = dict[Any, list[tuple[Guard, Variant]]]
"""Graphs by the key of a call and by which of its arguments have gradients."""


class LocalForwardPlan(NamedTuple):
    """Split of a module's layers.

    Args:
        path: Path of the module, for messages.
        splits: Path of each layer below the module, to its split; None for one that stays whole.
        inlined: Paths of the modules below whose forwards become part of the graph.
        ranks: Number of ranks.
        group: Tensor-parallel process group.
        parameters: Path of each split parameter below the module that its forward uses directly, to its split.
        shared: Paths of the whole layers and parameters below the module whose results meet sharded values.
        cuts_inputs: Whether whole inputs with gradients are cut. Modules around this one compute them from parameters.
        reduced_per_use: Paths of the whole parameters below the module that whole values meet too, here or elsewhere.
    """

    path: str
    splits: Mapping[str, LayerSplit | None]
    inlined: frozenset[str]
    ranks: int
    group: Group
    parameters: Mapping[str, ParameterSplit]
    shared: frozenset[str]
    cuts_inputs: bool
    reduced_per_use: frozenset[str]


class _GraphRecord:
    """Record of the graphs that a forward made. It has no ``__dict__``, as modules that have run equal those that have not.

    Attributes:
        results: Places of the sharded results, in the first graph.
        summed_inputs: Names of the inputs whose gradients that graph reduces.
        num_summed: Number of whole values whose gradients it reduces.
        recent: Graph of the last call.
    """

    __slots__ = ("num_summed", "recent", "results", "summed_inputs")

    def __init__(self) -> None:
        self.results: set[int] | None = None
        self.summed_inputs: set[str] = set()
        self.num_summed = 0
        self.recent: tuple[Any, Guard, Variant] | None = None

    def without_recent(self) -> _GraphRecord:
        copied = _GraphRecord()
        copied.results, copied.summed_inputs, copied.num_summed = self.results, self.summed_inputs, self.num_summed
        return copied


class LocalForward(Hidden):
    """Forward of a module that runs graphs of the whole module with local sizes.

    The first call of each shape, dtype and mode is traced. The module keeps its class, and hooks and wrappers stay around the
    graph.

    Args:
        module: Module with its layers still whole.
        plan: Split of its layers.
        shared: Graphs that identical modules share, so that a new shape is traced once for all; filled.

    Attributes:
        partial: Names of whole parameters whose gradients are reduced elsewhere. None until that is known.
    """

    partial: frozenset[str] | None = None

    def __init__(self, module: nn.Module, plan: LocalForwardPlan, shared: GraphCache | None = None) -> None:
        self._module, self._plan, self._whole = module, plan, meta_copy(module)
        for each in self._whole.modules():  # later hooks of the modules must not run in the copy
            each.__dict__.update({name: copy.copy(each.__dict__[name]) for name in HOOK_ATTRIBUTES if name in each.__dict__})
        self._made = _GraphRecord()
        self._reset({} if shared is None else shared)

    @property
    def parameters(self) -> Mapping[str, ParameterSplit]:
        """Split parameters below the module that its graphs use, by path."""
        return self._plan.parameters

    def copy_for(self, module: nn.Module, path: str) -> LocalForward:
        """Return the forward of an equal module at another path, with its layers still whole; both share their graphs."""
        copied = LocalForward(module, self._plan._replace(path=path), self._shared)
        copied.partial = self.partial
        return copied

    def check_example(self, root: nn.Module, target: str, example_inputs: Any) -> int:
        """Run the dry run of the call of ``target`` in an example of ``root``, with all layers whole.

        Returns:
            Number of whole values whose gradients the graph reduces.

        Raises:
            TraceError: the forward cannot be traced, or its layers cannot be split like this.
        """
        args, kwargs = split_inputs(example_inputs, root)
        below = f"{target}." if target else ""

        def kinds(path: str, child: nn.Module) -> LeafKind:
            return "inline" if path.removeprefix(below) in self._plan.inlined else "leaf"

        with _no_parametrization(root.get_submodule(target)):
            traced = trace_value(root, args, kwargs, kinds, target, symbolic=True, assigned="returned")
        try:
            self._layouts(traced.graph, traced)
        except LayoutError as err:
            raise TraceError(str(err)) from err
        return self._made.num_summed

    def install(self) -> None:
        """Replace the module's forward, with attributes as in the unmodified module: a shard step may have made some local."""
        _update_attributes(self._module, self._whole, ("", *self._plan.inlined))
        self._module.forward = self

    def _reset(self, shared: GraphCache) -> None:
        self.__signature__ = self._parameters = plain_signature(self._whole)
        self._shared, self._calls = shared, GraphCache()

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalForward:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied._module, copied._whole = copy.deepcopy(self._module, memo), copy.deepcopy(self._whole, memo)
        copied._plan, copied.partial = self._plan, self.partial
        copied._made = self._made.without_recent()
        copied._reset({})
        return copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph of the call.

        Raises:
            TraceError: the forward cannot be traced for this call, or would use the shards in another way than planned.
        """
        call, guard, variant = self.prepare(args, kwargs)
        inputs = {name: call.values[name] for name in guard.placeholders}
        variant.move_constants(guard, inputs)
        result, assigned = variant.run_on(self._module, inputs)
        for place, value in assigned.items():
            path, _, name = place.rpartition(".")
            setattr(self._module.get_submodule(path), name, value)
        return result

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, Guard, Variant]:
        """Return the graph of a call, traced if there is none yet; raise ``TraceError`` as ``__call__`` does."""
        call = Call(self._parameters, self._module, args, kwargs)
        make = self._uncompiled_make if "torch._dynamo" in sys.modules else self._make
        return call, *(self._find(call) or make(call, args, kwargs))

    @cached_property
    def _uncompiled_make(self) -> Callable[..., tuple[Guard, Variant]]:
        """``_make`` as a function that ``torch.compile`` of an enclosing module does not trace into."""
        return torch.compiler.disable(self._make)  # type: ignore[no-any-return, no-untyped-call]

    def _find(self, call: Call) -> tuple[Guard, Variant] | None:
        recent, graded = self._made.recent, _gradient_key(call)
        if recent is not None and recent[0] == graded and recent[1].problem(self._module, call) is None:
            return recent[1:]
        key = graded, call.key
        for found in self._calls.get(key, ()):
            if found[0].problem(self._module, call) is None:
                self._made.recent = graded, *found
                return found
        return None

    def _make(self, call: Call, args: Any, kwargs: Any) -> tuple[Guard, Variant]:
        """Return the graph that an identical module has for the call, or trace it."""
        for guard, variant in self._shared.get((_gradient_key(call), call.key), ()):
            if guard.problem(self._module, call) is None:
                with without_observers():
                    self._check_parts()
                return self._cache_call(call, _copied_guard(guard), variant)
        return self._trace(call, args, kwargs)

    def _trace(self, call: Call, args: Any, kwargs: Any) -> tuple[Guard, Variant]:
        plan, whole = self._plan, self._whole
        _update_attributes(whole, self._module, ("", *plan.inlined))
        _copy_dtypes(whole, self._module)
        try:
            with without_observers(), _no_parametrization(whole):
                self._check_parts()
                graph, guard, constants = trace_again(whole, args, kwargs, plan.inlined, assigned="returned")
                whole._buffers.update(constants)
                strip_origins(graph)
                layouts = self._layouts(graph)
                divide_graph(layouts, plan.group)
        except (TraceError, LayoutError, ValueError) as err:
            raise TraceError(
                f"the {type(self._module).__name__} at {plan.path!r} uses whole sizes of values that are sharded, and "
                f"cannot be traced for a call like this: {err}",
                failing_module=plan.path,
            ) from err
        _inline_constants(graph, constants)
        variant = Variant(graph, f"Local{type(self._module).__name__}")
        if not constants:  # constants may belong to this module alone
            _cache_graph(self._shared, call, _copied_guard(guard), variant)
        return self._cache_call(call, guard, variant)

    def _cache_call(self, call: Call, guard: Guard, variant: Variant) -> tuple[Guard, Variant]:
        self._made.recent = _gradient_key(call), guard, variant
        _cache_graph(self._calls, call, guard, variant)
        return guard, variant

    def _check_parts(self) -> None:
        """Raise ``TraceError`` for a shard of another size than planned, or of a layer that stays whole."""
        plan = self._plan
        for path, split in plan.splits.items():
            whole, module = self._whole.get_submodule(path), self._module.get_submodule(path)
            for name, value in module._parameters.items():
                if value is not None and is_sharded(value) and f"{path}.{name}" not in plan.parameters:
                    expected = whole._parameters[name]
                    if split is None or expected is None or _local_numel(value) != split.local_numel(expected, plan.ranks):
                        raise TraceError(f"{name!r} of the layer {path!r} has the shape {tuple(value.shape)} on this rank")

        for path, own in plan.parameters.items():
            expected, value = (each.get_parameter(path) for each in (self._whole, self._module))
            ranks = plan.ranks if own.owner is None else 1
            is_empty = own.owner is not None and not _local_numel(value)
            if not is_sharded(value) or (_local_numel(value) * ranks != expected.numel() and not is_empty):
                raise TraceError(f"the parameter {path!r} has the shape {tuple(value.shape)} on this rank")

    def _layouts(self, graph: fx.Graph, whole: nn.Module | None = None) -> Layouts:
        """Run the dry run of a graph of ``whole``, by default the module's copy, with layers split as planned.

        Raises:
            LayoutError: the splits do not fit together in this graph.
        """
        plan, whole = self._plan, whole or self._whole
        without_prototypes(graph)
        layers = {id(whole.get_submodule(path)) for path in plan.splits}
        candidates = {path: split for path, split in plan.splits.items() if split is not None and split.output == "sharded"}
        left = [whole.get_submodule(path) for path, split in plan.splits.items() if split is None]
        adapted = [node for node in graph.nodes if node.op.startswith("call")]
        kept = [split is not None and split.output == "kept" for split in plan.splits.values()]
        keeps = {id(whole.get_submodule(path)) for path, each in zip(plan.splits, kept, strict=True) if each}
        is_layer: Callable[..., bool] = lambda module, way="": id(module) in (keeps if way == "kept" else layers)  # noqa: E731
        fills = dict[fx.Node, ShardedFill]()
        while True:
            layouts = Layouts(
                *(whole, fake_mesh(plan.ranks), candidates, fills, is_layer, left, graph, adapted),
                returns_shards=True,
                parameters=plan.parameters,
                shared=plan.shared,
                cuts_inputs=plan.cuts_inputs,
                branches=self._planned_branches(graph, whole),
                reduced_per_use=plan.reduced_per_use,
            )
            try:
                layouts.check()
            except LayoutError as err:
                if (more := fills_to_shard(err)).keys() <= fills.keys():
                    raise
                fills |= more
            else:
                self._check_results(layouts)
                return layouts

    def _planned_branches(self, graph: fx.Graph, whole: nn.Module) -> list[Branches]:
        """Return the branches that ranks run some each, as planned; raise ``TraceError`` if the graph has others."""
        planned = {name: split for name, split in self._plan.parameters.items() if split.owner is not None}
        if not planned:
            return []
        ranks = self._plan.ranks
        found = [each for each in find_branches(graph, whole, ranks) if each.splits(ranks).keys() & planned]
        if {name: split for each in found for name, split in each.splits(ranks).items()} != planned:
            raise TraceError("its branches are not those that the plan distributes to the ranks")
        return found

    def _check_results(self, layouts: Layouts) -> None:
        """Compare sharded results and inputs with reduced gradients with those of the first graph.

        Raises:
            TraceError: other results are sharded, or a partial gradient would not be reduced.
        """
        (output,) = layouts.graph.find_nodes(op="output")
        parts = {place for place, each in enumerate(leaves(output.args[0][0])) if each in layouts.local_shapes}
        summed = [other for found in layouts.reduced_gradients.values() for other in found]
        given = {str(other.target) for other in summed if other.op == "placeholder"}
        made = self._made
        if made.results is None:
            made.results, made.summed_inputs, made.num_summed = parts, given, len(summed)
        if parts != made.results or not given <= made.summed_inputs:
            raise TraceError("it returns shards of other results, or reduces other gradients, than in the example")
        if self.partial is not None and (missing := layouts.partial_parameters.keys() - self.partial):
            raise TraceError(f"the gradient of {min(missing)!r} is partial, and was whole in the example")


@contextmanager
def _no_parametrization(module: nn.Module) -> Iterator[None]:
    """Raise ``TraceError`` for a forward that parametrizes while it runs: a graph would call the layer without that."""
    with no_parametrization_in_forward() as found:
        yield
    if not {*module.modules()}.isdisjoint(found):
        raise TraceError(f"its forward parametrizes the tensors of its {type(found[0]).__name__} while it runs")


def _copied_guard(guard: Guard) -> Guard:
    """Return a guard for another module, as a guard caches the objects of one."""
    return replace(guard, attributes=copy.copy(guard.attributes))


def _gradient_key(call: Call) -> Any:
    """Return which arguments of a call have gradients; a graph reduces gradients only of those."""
    if not torch.is_grad_enabled():
        return False
    return tuple(each.requires_grad for each in tree_leaves(list(call.values.values())) if isinstance(each, torch.Tensor))


def _cache_graph(calls: GraphCache, call: Call, guard: Guard, variant: Variant) -> None:
    key = _gradient_key(call), call.key
    if len(calls) >= _MAX_CALLS:
        calls.clear()
    calls.setdefault(key, []).insert(0, (guard, variant))
    del calls[key][_MAX_GRAPHS:]


def _inline_constants(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
    """Replace constants that no module holds by nodes that return them."""
    for node in graph.find_nodes(op="get_attr"):
        if str(node.target) in constants:
            with graph.inserting_before(node):
                held = graph.call_function(_constant_getter(constants[str(node.target)]))
            node.replace_all_uses_with(held)
            graph.erase_node(node)


def _local_numel(tensor: torch.Tensor) -> int:
    """Return the number of elements of this rank's shard in a forward, even if an engine holds less of it now."""
    return math.prod(whole_shape(tensor) or tensor.shape)


def _constant_getter(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    def constant() -> torch.Tensor:
        return tensor

    return constant


def _update_attributes(target: nn.Module, source: nn.Module, paths: Iterable[str]) -> None:
    """Copy the attributes of modules from those at the same paths of another module."""
    for path in paths:
        new = {name: value for name, value in vars(source.get_submodule(path)).items() if name not in _KEPT_ATTRIBUTES}
        target.get_submodule(path).__dict__.update(new)


def _copy_dtypes(target: nn.Module, source: nn.Module) -> None:
    """Cast weights and buffers to the present dtypes of those in another module: an engine may have cast them."""
    named = (*source.named_parameters(remove_duplicate=False), *source.named_buffers(remove_duplicate=False))
    dtypes = {name: tensor.dtype for name, tensor in named}
    for name, tensor in (*target.named_parameters(), *target.named_buffers()):
        if dtypes.get(name, tensor.dtype) != tensor.dtype:
            tensor.data = tensor.data.to(dtypes[name])
