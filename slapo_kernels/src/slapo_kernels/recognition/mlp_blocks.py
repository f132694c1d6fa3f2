"""Recognition of small blocks whose forward calls their children with kernels between: MLPs and dropout-residual blocks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import fx, nn

from slapo_core import TraceError
from slapo_tracing import trace_module
from slapo_tracing.graphs import TracedModule
from slapo_tracing.matching import operator_of

from ..replacements.call_guard import DTYPES, CallGuard, attributes_are_comparable
from ..replacements.fused_ops import BiasActivation, DropoutResidual, FusedOp, GatedActivation, LayerCall
from ..replacements.kernel_modules import FusedForward
from ..replacements.meta_copies import is_linear, is_stateless, meta_copy
from .elementwise_regions import KernelMatch, Region, match_kernel
from .forward_observer import ELEMENTWISE, HALVES, TYPICAL_BATCH, ForwardObserver, StableCalls, inputs_of, tensor_inputs
from .numeric_comparison import probe_context

_WIDTH = 16
"""Width of a probe of experts."""
_MAX_PARTS = 16
"""Submodules that a block may have; a module with more is a model."""


def recognise_block(module: nn.Module) -> FusedForward | None:
    """Return the fused forward of a module that is valid in both modes and for any batch shape, or None."""
    names = tensor_inputs(module)
    if names is None or len(names) > 2 or not module._modules or not _is_small(module):
        return None
    with probe_context():
        widths = _input_widths(module, len(names))
        first = widths and StableCalls.observe(module, torch.float32, widths, whole=True)
        if not widths or not first or not _has_equal_calls_with_own_dtypes(module, widths, first):
            return None
        reader = _read(module, names, widths)
        if reader is None or not any(step.kernel for step in reader.steps):
            return None
        reads = reader.reads(first, torch.float32)
        if reads is None or not attributes_are_comparable(module, reads):
            return None
        found = {torch.float32: reads}
        for dtype in DTYPES[1:]:
            other = StableCalls.observe(module, dtype, widths, whole=True)
            if other is None or (other.calls, other.dims) != (first.calls, first.dims):
                continue
            if (reads := reader.reads(other, dtype)) is not None:
                found[dtype] = reads
    guard = CallGuard(tuple(found), first.dims, tuple(sorted(set().union(*found.values()))))
    return FusedForward(names, tuple(reader.steps), guard, tuple(reader.absorbed.items()))


def _input_widths(module: nn.Module, count: int) -> tuple[int, ...] | None:
    """Return the widths of inputs with which the forward runs, or None."""
    observed = ForwardObserver(module, torch.float32, True, whole=True)
    possible = product(_widths(module), repeat=count)
    return next((each for each in possible if observed.calls(*inputs_of(each, torch.float32)(TYPICAL_BATCH)) is not None), None)


def _is_small(module: nn.Module) -> bool:
    """Return whether there are few submodules, all of which run on meta tensors: layers, norms, functions or containers."""
    inside = list(module.modules())[1:]
    if len(inside) > _MAX_PARTS or any(isinstance(part, fx.GraphModule) or part._buffers for part in inside):
        return False
    weights = [weight for part in inside if not is_linear(part) for weight in part._parameters.values()]
    return all(weight is None or weight.dim() <= 1 for weight in weights)


def _has_equal_calls_with_own_dtypes(module: nn.Module, widths: tuple[int, ...], first: StableCalls) -> bool:
    """Return whether a module with weights of several dtypes makes the same calls as with one: it does not cast."""
    own = dict.fromkeys(tensor.dtype for tensor in module.parameters() if tensor.is_floating_point())
    observed = ForwardObserver(module, None, True, whole=True)
    return len(own) < 2 or any(observed.calls(*inputs_of(widths, dtype)(TYPICAL_BATCH)) == first.calls for dtype in own)


def _widths(module: nn.Module) -> list[int]:
    """Return the sizes of all weights' dimensions: candidates for the widths of inputs."""
    found: dict[int, None] = {}
    for part in module.modules():
        shapes = [tensor.shape for tensor in part._parameters.values() if tensor is not None]
        found.update(dict.fromkeys(size for shape in shapes for size in shape))
    return list(found)


def _read(module: nn.Module, names: tuple[str, ...], widths: tuple[int, ...]) -> _GraphReader | None:
    try:
        inputs = tuple(inputs_of(widths, torch.float32)(TYPICAL_BATCH))
        traced = trace_module(meta_copy(module, torch.float32, True), inputs, leaf=lambda path, child: True)
        return _GraphReader(traced, module, names)
    except (TraceError, _UnknownOperation):
        return None


class _UnknownOperation(Exception):
    """Raised if the graph has an operation that no fused forward has."""


class _GraphReader:
    """Reader of a graph into the operations of a fused forward.

    Args:
        traced: The graph of a meta copy of ``module``.
        names: Names of the module's arguments.

    Attributes:
        absorbed: Name to child whose work a kernel does.

    Raises:
        _UnknownOperation: no fused forward computes the graph.
    """

    def __init__(self, traced: TracedModule, module: nn.Module, names: tuple[str, ...]) -> None:
        self.traced, self.module, self.names = traced, module, names
        self.nodes: list[fx.Node] = list(traced.graph.nodes)
        self.places: dict[fx.Node, int] = {}
        self.steps: list[FusedOp] = []
        self.absorbed: dict[str, nn.Module] = {}
        self.merged: set[fx.Node] = set()
        """Nodes of children whose call is part of a kernel's operation."""
        self.found: list[tuple[Region, KernelMatch]] = []
        self.functions: dict[str, int] = {}
        """Absorbed stateless children to the width of their input."""
        self._run()

    def reads(self, own: StableCalls, dtype: torch.dtype) -> set[tuple[str, str]] | None:
        """Return the attributes that the module and its absorbed children read; None if a kernel differs in this dtype."""
        if not all(region.matches_in(found, dtype) for region, found in self.found):
            return None
        reads = {read for read in own.reads if not read[0]}
        for name, part in self.absorbed.items():
            if _is_dropout(part):
                reads.add((name, "inplace"))
                continue
            stable = StableCalls.observe(part, dtype, (self.functions[name],), ELEMENTWISE)
            if stable is None or not set(own.dims) <= set(stable.dims):
                return None
            reads |= {(name, attribute) for _, attribute in stable.reads}
        return reads

    def _run(self) -> None:
        inputs = self.traced.graph.find_nodes(op="placeholder")
        fusible = {node for node in self.nodes if self._is_fusible(node)}
        if [node.target for node in inputs] != list(self.names):
            raise _UnknownOperation
        self.places = {node: index for index, node in enumerate(inputs)}
        ends = [node for node in self.nodes if node in fusible and not fusible.issuperset(node.users)]
        regions = {end: self._region(end, fusible) for end in ends}
        if fusible != {node for region in regions.values() for node in region.nodes}:
            raise _UnknownOperation
        makers = {node: self._dropout_residual(region) or self._kernel(region) for node, region in regions.items()}
        for node in self.nodes:
            if node in makers:
                self._emit(node, makers[node]())
            elif node.op == "call_module" and node not in fusible and node not in self.merged:
                self._emit(node, self._call(node))
        (result,) = self.nodes[-1].args
        if not isinstance(result, fx.Node) or self._place_of(result) != len(self.names) + len(self.steps) - 1:
            raise _UnknownOperation
        if any(node.op in ("get_attr", "call_function", "call_method") and node not in fusible for node in self.nodes):
            raise _UnknownOperation

    def _part(self, node: fx.Node) -> nn.Module:
        """Return the child of the module that a node calls."""
        part = self.module._modules.get(str(node.target))
        if part is None:  # deeper inside
            raise _UnknownOperation
        return part

    def _is_fusible(self, node: fx.Node) -> bool:
        """Return whether a node may be part of a kernel: a function, or a stateless child other than dropout."""
        if node.op != "call_module":
            return node.op in ("call_function", "call_method")
        part = self._part(node)
        return is_stateless(part) and not _is_dropout(part) and not isinstance(part, nn.Identity)

    def _region(self, end: fx.Node, fusible: set[fx.Node]) -> Region:
        """Return the fusible nodes that compute ``end``; their inputs are placeholders and calls of other children."""
        inside, inputs, todo = {end}, dict[fx.Node, None](), [end]
        for node in todo:
            for other in node.all_input_nodes:
                if other not in fusible:
                    inputs[other] = None
                elif other not in inside:
                    inside.add(other)
                    todo.append(other)
        if any(node is not end and not inside.issuperset(node.users) for node in inside):
            raise _UnknownOperation
        if not all(isinstance(node.meta.get("val"), torch.Tensor) for node in inputs):
            raise _UnknownOperation
        return Region(self.traced, end, sorted(inside), sorted(inputs))

    def _dropout_residual(self, region: Region) -> Callable[[], FusedOp] | None:
        """Return the maker of a dropout-residual operation if the region is one."""
        end = region.output
        if len(region.nodes) > 1 or operator_of(end) != "add" or len(end.args) != 2 or end.kwargs or len(region.inputs) != 2:
            return None
        if len({(value.shape, value.dtype) for value in (node.meta["val"] for node in region.inputs)}) > 1:
            return None
        dropouts = [node for node in region.inputs if node.op == "call_module" and _is_dropout(self._part(node))]
        if not dropouts or not self._is_only_for(dropouts[-1], region, ()):
            return None
        dropout, name = dropouts[-1], str(dropouts[-1].target)
        (source,) = dropout.args
        if not isinstance(source, fx.Node) or dropout.kwargs:
            return None
        self.merged.add(dropout)
        self.absorbed[name] = self._part(dropout)
        start, part = self._layer(source, Region(self.traced, end, [dropout, end], [source]), (dropout,))
        (residual,) = (node for node in region.inputs if node is not dropout)
        return lambda: DropoutResidual(self._place_of(start), self._place_of(residual), name, part)

    def _kernel(self, region: Region) -> Callable[[], FusedOp]:
        """Return the maker of an activation or gate operation; raise ``_UnknownOperation`` if no kernel computes it."""
        found = region.recognise()
        if found is None:
            raise _UnknownOperation
        self.found.append((region, found))
        for node in region.nodes:
            if node.op == "call_module":
                self._absorb(node)
        if found.kernel != "bias_act":
            gate, up = (region.inputs[place] for place in found.order)
            return lambda: GatedActivation(
                found.kernel, self._place_of(gate), self._place_of(up), found.options, found.gate_first
            )
        (source,) = region.inputs
        start, part = self._layer(source, region, ())
        return lambda: BiasActivation(self._place_of(start), dict(found.options)["activation"], part)

    def _absorb(self, node: fx.Node) -> None:
        """Record a stateless child that a region calls."""
        name, (given, *others) = str(node.target), node.args
        if others or node.kwargs or not isinstance(given, fx.Node):
            raise _UnknownOperation
        self.absorbed[name], self.functions[name] = self._part(node), given.meta["val"].shape[-1]

    def _layer(self, node: fx.Node, region: Region, but: tuple[fx.Node, ...]) -> tuple[Any, str | None]:
        """Return input and name of the linear layer that the node calls if the next operation can add its bias, and merge it.

        Return the node itself and None otherwise.
        """
        if node.op != "call_module" or not is_linear(self._part(node)) or not self._is_only_for(node, region, but):
            return node, None
        if len(node.args) != 1 or node.kwargs or getattr(self._part(node), "bias", None) is None:
            return node, None
        self.merged.add(node)
        return node.args[0], str(node.target)

    def _is_only_for(self, node: fx.Node, region: Region, but: tuple[fx.Node, ...]) -> bool:
        """Return whether only the region uses the value, and no other child, which might draw random numbers, runs between."""
        between = self.nodes[self.nodes.index(node) + 1 : self.nodes.index(region.output)]
        others = {each for each in between if each.op == "call_module"} - {*region.nodes, *but}
        return set(region.nodes).issuperset(node.users) and not others

    def _call(self, node: fx.Node) -> LayerCall:
        if node.kwargs or not node.args or not isinstance(node.meta.get("val"), torch.Tensor):
            raise _UnknownOperation
        self._part(node)
        return LayerCall(str(node.target), tuple(self._place_of(arg) for arg in node.args))

    def _emit(self, node: fx.Node, step: FusedOp) -> None:
        self.places[node] = len(self.names) + len(self.steps)
        self.steps.append(step)

    def _place_of(self, node: Any) -> int:
        if node not in self.places:
            raise _UnknownOperation
        return self.places[node]


def _is_dropout(part: nn.Module) -> bool:
    return isinstance(part, nn.Dropout) and type(part).forward is nn.Dropout.forward and not part.inplace


def recognise_experts(module: nn.Module) -> FusedForward | None:
    """Return the gate of a mixture's experts whose method ``_apply_gate`` a kernel can replace, as in Transformers, or None."""
    parts = dict(module.named_children())
    names = tensor_inputs(module, "_apply_gate")
    if names is None or len(names) > 1 or not all(map(is_stateless, parts.values())):
        return None
    found: KernelMatch | None = None
    seen = dict[torch.dtype, StableCalls]()
    with probe_context():
        for dtype in DTYPES:
            stable = StableCalls.observe(module, dtype, (_WIDTH,), ELEMENTWISE | HALVES, "_apply_gate")
            gate: Any = meta_copy(module, dtype, training=False)
            now = stable and match_kernel(gate._apply_gate, 1, (6, _WIDTH), dtype, found and {found.kind})
            if stable and now and (not seen or stable.dims == seen[torch.float32].dims):
                found, seen[dtype] = found or now, stable
            elif not seen:
                return None
    reads = {read for stable in seen.values() for read in stable.reads}
    if found is None or found.kernel == "bias_act" or not attributes_are_comparable(module, reads):
        return None
    guard = CallGuard(tuple(seen), seen[torch.float32].dims, tuple(sorted(reads)))
    step = GatedActivation(found.kernel, 0, 0, found.options, found.gate_first)
    return FusedForward(names, (step,), guard, tuple(parts.items()), method="_apply_gate")
