"""Forward of a module whose layers a rank has parts of, from graphs with sizes of these parts."""

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
from slapo_tracing.nodes import Hidden, unobserved, whole_shape
from slapo_tracing.recording import HOOK_ATTRIBUTES, WRAPPER_ATTRIBUTES
from slapo_tracing.tracers import LeafKind, trace_again, trace_value

from ...communication._torch_private import fake_mesh
from ...communication.collectives import Group
from ...rules.parametrizations import no_parametrization_in_forward
from ..dry_run.layouts import LayoutError, Layouts
from ..dry_run.parallel_branches import Branches, find_branches
from ..dry_run.size_arguments import leaves
from ..dry_run.split_specs import ParameterSplit, Split
from .graph_division import make_local
from .size_origins import forget
from .tensor_prototypes import without_prototypes

_MOST_CALLS, _MOST_GRAPHS = 256, 8
_KEPT = {*vars(nn.Module()), *WRAPPER_ATTRIBUTES} - {"training"}
"""Attributes of the whole modules that those of the ones which run do not replace."""


Calls = dict[Any, list[tuple[Guard, Variant]]]
"""Graphs by which arguments of a call have gradients, and its key."""


class Plan(NamedTuple):
    """Split of a module's layers.

    Args:
        path: Path of the module, for messages.
        splits: Path of each layer below the module, to how it is split; None for those that stay whole.
        opened: Paths of the modules below whose forwards become part of the graph.
        ranks: Number of ranks.
        group: These ranks.
        parameters: Path of each parameter below the module that its forward uses itself and that is split, to how.
        shared: Paths of the whole layers and parameters below the module whose results meet sharded values.
        cuts_inputs: Whether whole arguments with gradients are cut, which modules around it make from parameters.
        summed_by_use: Paths of the whole parameters below the module that whole values meet too, here or elsewhere.
    """

    path: str
    splits: Mapping[str, Split | None]
    opened: frozenset[str]
    ranks: int
    group: Group
    parameters: Mapping[str, ParameterSplit]
    shared: frozenset[str]
    cuts_inputs: bool
    summed_by_use: frozenset[str]


class LocalForward(Hidden):
    """Forward of a module by graphs of the whole module, with sizes of this rank's parts.

    A call unlike those before, of another shape, dtype or mode, is traced once. The module keeps its class; hooks and wrappers
    stay around the graph.

    Args:
        module: The module, its layers still whole.
        plan: How they are going to be split.
        shared: Graphs that identical modules have, so that a call of a new shape is traced once for all; filled.

    Attributes:
        partial: Names of whole parameters whose gradients are summed elsewhere; None as long as that is not known.
        num_summed: Number of whole values whose gradients the first graph sums.
    """

    num_summed = 0
    partial: frozenset[str] | None = None

    def __init__(self, module: nn.Module, plan: Plan, shared: Calls | None = None) -> None:
        self._module, self._plan, self._whole = module, plan, meta_copy(module)
        for each in self._whole.modules():  # what is hooked to the modules later is not hooked to these
            each.__dict__.update({name: copy.copy(each.__dict__[name]) for name in HOOK_ATTRIBUTES if name in each.__dict__})
        self._results: set[int] | None = None
        self._summed_inputs: set[str] = set()
        self._reset({} if shared is None else shared)

    @property
    def parameters(self) -> Mapping[str, ParameterSplit]:
        """Parameters below the module that are split and that its graphs use, by path."""
        return self._plan.parameters

    def try_on(self, root: nn.Module, target: str, example_inputs: Any) -> int:
        """Make the dry run of the call in an example, while all layers are whole; return how many gradients are summed.

        Args:
            root: The model.
            target: Path of the module in it.
            example_inputs: Of the model.

        Raises:
            TraceError: the forward cannot be traced, or its layers cannot be split like this.
        """
        args, kwargs = split_inputs(example_inputs, root)
        kinds: Callable[[str, nn.Module], LeafKind] = lambda path, child: "inline" if self._opens(path, target) else "leaf"  # noqa: E731
        with _unparametrised(root.get_submodule(target)):
            traced = trace_value(root, args, kwargs, kinds, target, symbolic=True, assigned="returned")
        try:
            self._layouts(traced.graph, traced)
        except LayoutError as err:
            raise TraceError(str(err)) from err
        return self.num_summed

    def _opens(self, path: str, target: str) -> bool:
        return path.removeprefix(f"{target}." if target else "") in self._plan.opened

    def install(self) -> None:
        """Take the place of the module's forward, which then counts whole sizes: a shard step may have let it count parts."""
        _update(self._module, self._whole, ("", *self._plan.opened))
        self._module.forward = self

    def _reset(self, shared: Calls) -> None:
        self.__signature__ = self._parameters = plain_signature(self._whole)
        self._shared, self._calls = shared, Calls()
        self._recent: tuple[Any, Guard, Variant] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalForward:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied._module, copied._whole = copy.deepcopy(self._module, memo), copy.deepcopy(self._whole, memo)
        copied._plan, copied.partial = self._plan, self.partial
        copied._results, copied._summed_inputs, copied.num_summed = self._results, self._summed_inputs, self.num_summed
        copied._reset({})
        return copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph of the call.

        Raises:
            TraceError: the forward cannot be traced for this call, or would use the parts in another way.
        """
        call, guard, variant = self.prepare(args, kwargs)
        inputs = {name: call.values[name] for name in guard.placeholders}
        variant.follow(guard, inputs)
        result, assigned = variant.run_on(self._module, inputs)
        for place, value in assigned.items():
            path, _, name = place.rpartition(".")
            setattr(self._module.get_submodule(path), name, value)
        return result

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, Guard, Variant]:
        """Return the graph of a call, made where there is none.

        Raises:
            TraceError: see ``__call__``.
        """
        call = Call(self._parameters, self._module, args, kwargs)
        make = self._uncompiled_make if "torch._dynamo" in sys.modules else self._make
        return call, *(self._find(call) or make(call, args, kwargs))

    @cached_property
    def _uncompiled_make(self) -> Callable[..., tuple[Guard, Variant]]:
        """The method as a call that ``torch.compile`` of a module around this one does not look into."""
        return torch.compiler.disable(self._make)  # type: ignore[no-any-return, no-untyped-call]

    def _find(self, call: Call) -> tuple[Guard, Variant] | None:
        recent, graded = self._recent, _graded(call)
        if recent is not None and recent[0] == graded and recent[1].problem(self._module, call) is None:
            return recent[1:]
        key = graded, call.key
        for found in self._calls.get(key, ()):
            if found[0].problem(self._module, call) is None:
                self._recent = graded, *found
                return found
        return None

    def _make(self, call: Call, args: Any, kwargs: Any) -> tuple[Guard, Variant]:
        """Take the graph that an identical module has for the call, or trace it."""
        for guard, variant in self._shared.get((_graded(call), call.key), ()):
            if guard.problem(self._module, call) is None:
                with unobserved():
                    self._check_parts()
                return self._keep(call, _copied(guard), variant)
        return self._trace(call, args, kwargs)

    def _trace(self, call: Call, args: Any, kwargs: Any) -> tuple[Guard, Variant]:
        plan, whole = self._plan, self._whole
        _update(whole, self._module, ("", *plan.opened))
        _copy_dtypes(whole, self._module)
        try:
            with unobserved(), _unparametrised(whole):
                self._check_parts()
                graph, guard, constants = trace_again(whole, args, kwargs, plan.opened, assigned="returned")
                whole._buffers.update(constants)
                forget(graph)
                layouts = self._layouts(graph)
                make_local(layouts, plan.group)
        except (TraceError, LayoutError, ValueError) as err:
            raise TraceError(
                f"the {type(self._module).__name__} at {plan.path!r} counts whole sizes, of which this rank has a part, and "
                f"cannot be traced for a call like this: {err}",
                failing_module=plan.path,
            ) from err
        _embed(graph, constants)
        variant = Variant(graph, f"Local{type(self._module).__name__}")
        if not constants:  # else tensors of this very module, perhaps
            _add(self._shared, call, _copied(guard), variant)
        return self._keep(call, guard, variant)

    def _keep(self, call: Call, guard: Guard, variant: Variant) -> tuple[Guard, Variant]:
        self._recent = _graded(call), guard, variant
        _add(self._calls, call, guard, variant)
        return guard, variant

    def _check_parts(self) -> None:
        """Compare the layers' parts on this rank with the plan.

        Raises:
            TraceError: a part of another size, or of a layer that stays whole.
        """
        plan = self._plan
        for path, split in plan.splits.items():
            whole, module = self._whole.get_submodule(path), self._module.get_submodule(path)
            for name, value in module._parameters.items():
                if value is not None and is_sharded(value) and f"{path}.{name}" not in plan.parameters:
                    expected = whole._parameters[name]
                    if split is None or expected is None or _number(value) != split.local_number(expected, plan.ranks):
                        raise TraceError(f"{name!r} of the layer {path!r} has the shape {tuple(value.shape)} on this rank")

        for path, own in plan.parameters.items():
            expected, value = (each.get_parameter(path) for each in (self._whole, self._module))
            ranks = plan.ranks if own.owner is None else 1
            is_empty = own.owner is not None and not _number(value)
            if not is_sharded(value) or (_number(value) * ranks != expected.numel() and not is_empty):
                raise TraceError(f"the parameter {path!r} has the shape {tuple(value.shape)} on this rank")

    def _layouts(self, graph: fx.Graph, whole: nn.Module | None = None) -> Layouts:
        """Make the dry run of a graph with layers split as planned.

        Args:
            graph: The graph.
            whole: Holds what its targets name; None for the module's copy.

        Raises:
            LayoutError: they do not fit together in this graph.
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
        layouts = Layouts(
            *(whole, fake_mesh(plan.ranks), candidates, {}, is_layer, left, graph, adapted),
            gives_parts=True,
            parameters=plan.parameters,
            shared=plan.shared,
            cuts_inputs=plan.cuts_inputs,
            dealt=self._dealt(graph, whole),
            summed_by_use=plan.summed_by_use,
        )
        layouts.check()
        self._check_results(layouts)
        return layouts

    def _dealt(self, graph: fx.Graph, whole: nn.Module) -> list[Branches]:
        """Return the branches of a graph that are dealt out as planned.

        Raises:
            TraceError: the graph has others.
        """
        planned = {name: split for name, split in self._plan.parameters.items() if split.owner is not None}
        if not planned:
            return []
        found = [
            each for each in find_branches(graph, whole, self._plan.ranks) if each.splits(self._plan.ranks).keys() & planned
        ]
        if {name: split for each in found for name, split in each.splits(self._plan.ranks).items()} != planned:
            raise TraceError("its branches are others than those that the ranks share out")
        return found

    def _check_results(self, layouts: Layouts) -> None:
        """Compare results that are parts, which no other module uses, and inputs with summed gradients with the first graph's.

        Raises:
            TraceError: other results are parts, or a gradient is a part that nobody sums.
        """
        (output,) = layouts.graph.find_nodes(op="output")
        parts = {place for place, each in enumerate(leaves(output.args[0][0])) if each in layouts.local}
        summed = [other for found in layouts.summed_gradients.values() for other in found]
        given = {str(other.target) for other in summed if other.op == "placeholder"}
        if self._results is None:
            self._results, self._summed_inputs, self.num_summed = parts, given, len(summed)
        if parts != self._results or not given <= self._summed_inputs:
            raise TraceError("it gives parts of other results, or sums other gradients, than in the example")
        if self.partial is not None and (missing := layouts.partial.keys() - self.partial):
            raise TraceError(f"the gradient of {min(missing)!r} is a part that was whole in the example")


@contextmanager
def _unparametrised(module: nn.Module) -> Iterator[None]:
    """Refuse a forward that parametrises a layer's tensors while it runs: a graph would call the layer without that.

    Raises:
        TraceError: it does.
    """
    with no_parametrization_in_forward() as found:
        yield
    if not {*module.modules()}.isdisjoint(found):
        raise TraceError(f"its forward parametrises the tensors of its {type(found[0]).__name__} while it runs")


def _copied(guard: Guard) -> Guard:
    """Return a guard for another module: it is fast where it compares the objects of one."""
    return replace(guard, attributes=copy.copy(guard.attributes))


def _graded(call: Call) -> Any:
    """Return which arguments of a call have gradients: a graph sums those of the values that have any."""
    if not torch.is_grad_enabled():
        return False
    return tuple(each.requires_grad for each in tree_leaves(list(call.values.values())) if isinstance(each, torch.Tensor))


def _add(calls: Calls, call: Call, guard: Guard, variant: Variant) -> None:
    key = _graded(call), call.key
    if len(calls) >= _MOST_CALLS:
        calls.clear()
    calls.setdefault(key, []).insert(0, (guard, variant))
    del calls[key][_MOST_GRAPHS:]


def _embed(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
    """Let tensors that the forward used, and no module holds, be part of the graph."""
    for node in graph.find_nodes(op="get_attr"):
        if str(node.target) in constants:
            with graph.inserting_before(node):
                held = graph.call_function(_giving(constants[str(node.target)]))
            node.replace_all_uses_with(held)
            graph.erase_node(node)


def _number(tensor: torch.Tensor) -> int:
    """Return the number of elements that this rank's part has while the module runs: an engine may have cut it further."""
    return math.prod(whole_shape(tensor) or tensor.shape)


def _giving(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    def constant() -> torch.Tensor:
        return tensor

    return constant


def _update(target: nn.Module, source: nn.Module, paths: Iterable[str]) -> None:
    """Give modules the attributes that those at the same paths of another one have now."""
    for path in paths:
        new = {name: value for name, value in vars(source.get_submodule(path)).items() if name not in _KEPT}
        target.get_submodule(path).__dict__.update(new)


def _copy_dtypes(target: nn.Module, source: nn.Module) -> None:
    """Give weights and buffers the dtypes that those of the same names in another module have now: an engine may cast them."""
    named = (*source.named_parameters(remove_duplicate=False), *source.named_buffers(remove_duplicate=False))
    dtypes = {name: tensor.dtype for name, tensor in named}
    for name, tensor in (*target.named_parameters(), *target.named_buffers()):
        if dtypes.get(name, tensor.dtype) != tensor.dtype:
            tensor.data = tensor.data.to(dtypes[name])
