"""Small modules whose forward is calls of their parts and kernels between them: MLPs, and what follows a sub-layer."""

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

from ..replacements.call_guard import DTYPES, Conditions, can_be_compared
from ..replacements.fused_ops import Activate, AddDropped, Call, Gate, Step
from ..replacements.kernel_modules import Experts, Program
from ..replacements.meta_copies import bare_copy, is_function, is_linear
from .elementwise_regions import Found, Region, identify
from .forward_observer import ELEMENTWISE, HALVES, USUAL, Observed, Steady, inputs_of
from .forward_signature import tensor_inputs
from .numeric_comparison import quietly

_WIDTH = 16
"""Of a probe of experts."""
_MOST = 16
"""Parts that a module may have in it; more than that is a model."""


def recognise_program(module: nn.Module) -> Program | None:
    """The program that computes what the module does, in both modes and whatever the batch; None where none is known."""
    names = tensor_inputs(module)
    if names is None or len(names) > 2 or not module._modules or not _is_small(module):
        return None
    with quietly():
        widths = _input_widths(module, len(names))
        first = widths and Steady.of(module, torch.float32, widths, whole=True)
        if not widths or not first or not _has_equal_calls_with_own_dtypes(module, widths, first):
            return None
        reading = _read(module, names, widths)
        if reading is None or not any(step.kernel for step in reading.steps):
            return None
        reads = reading.reads(first, torch.float32)
        if reads is None or not can_be_compared(module, reads):
            return None
        found = {torch.float32: reads}
        for dtype in DTYPES[1:]:
            other = Steady.of(module, dtype, widths, whole=True)
            if other is None or (other.calls, other.dims) != (first.calls, first.dims):
                continue
            if (reads := reading.reads(other, dtype)) is not None:
                found[dtype] = reads
    conditions = Conditions(tuple(found), first.dims, tuple(sorted(set().union(*found.values()))))
    return Program(names, tuple(reading.steps), conditions, tuple(reading.absorbed.items()))


def _input_widths(module: nn.Module, count: int) -> tuple[int, ...] | None:
    """Of inputs that the forward takes."""
    observed = Observed(module, torch.float32, True, whole=True)
    possible = product(_widths(module), repeat=count)
    return next((each for each in possible if observed.calls(*inputs_of(each, torch.float32)(USUAL)) is not None), None)


def _is_small(module: nn.Module) -> bool:
    inside = list(module.modules())[1:]
    return len(inside) <= _MOST and all(_is_known(part) for part in inside)


def _is_known(module: nn.Module) -> bool:
    """A part whose forward can be run on tensors without numbers: a layer, a norm, a function, or made of these."""
    if isinstance(module, fx.GraphModule) or module._buffers:
        return False
    return is_linear(module) or all(tensor is None or tensor.dim() <= 1 for tensor in module._parameters.values())


def _has_equal_calls_with_own_dtypes(module: nn.Module, widths: tuple[int, ...], first: Steady) -> bool:
    """Whether weights of several dtypes, where it has such, are no reason to cast."""
    own = dict.fromkeys(tensor.dtype for tensor in module.parameters() if tensor.is_floating_point())
    observed = Observed(module, None, True, whole=True)
    return len(own) < 2 or any(observed.calls(*inputs_of(widths, dtype)(USUAL)) == first.calls for dtype in own)


def _widths(module: nn.Module) -> list[int]:
    """Numbers of features that the module's layers take or return."""
    found: dict[int, None] = {}
    for part in module.modules():
        shapes = [tensor.shape for tensor in part._parameters.values() if tensor is not None]
        found.update(dict.fromkeys(size for shape in shapes for size in shape))
    return list(found)


def _read(module: nn.Module, names: tuple[str, ...], widths: tuple[int, ...]) -> _Reading | None:
    try:
        inputs = tuple(inputs_of(widths, torch.float32)(USUAL))
        traced = trace_module(bare_copy(module, torch.float32, True), inputs, leaf=lambda path, child: True)
        return _Reading(traced, module, names)
    except (TraceError, _NotKnown):
        return None


class _NotKnown(Exception):
    """The graph has something in it that no program has."""


class _Reading:
    """A graph as a program.

    Args:
        traced: The graph, of a bare copy.
        module: The module itself.
        names: Of its arguments.

    Attributes:
        steps: Of the program.
        absorbed: Parts whose work a kernel does.

    Raises:
        _NotKnown: there is no program.
    """

    def __init__(self, traced: TracedModule, module: nn.Module, names: tuple[str, ...]) -> None:
        self.traced, self.module, self.names = traced, module, names
        self.nodes: list[fx.Node] = list(traced.graph.nodes)
        self.places: dict[fx.Node, int] = {}
        self.steps: list[Step] = []
        self.absorbed: dict[str, nn.Module] = {}
        self.merged: set[fx.Node] = set()
        """Calls that the step of a kernel makes."""
        self.found: list[tuple[Region, Found]] = []
        self.functions: dict[str, int] = {}
        """Parts that are functions to the width of what they are called with."""
        self._run()

    def reads(self, own: Steady, dtype: torch.dtype) -> set[tuple[str, str]] | None:
        """The attributes that module and parts go by; None where a kernel computes something else in this dtype.

        Args:
            own: What the forward does.
            dtype: Of all.
        """
        if not all(region.is_still(found, dtype) for region, found in self.found):
            return None
        reads = {read for read in own.reads if not read[0]}
        for name, part in self.absorbed.items():
            if _is_dropout(part):
                reads.add((name, "inplace"))
                continue
            steady = Steady.of(part, dtype, (self.functions[name],), ELEMENTWISE)
            if steady is None or not set(own.dims) <= set(steady.dims):
                return None
            reads |= {(name, attribute) for _, attribute in steady.reads}
        return reads

    def _run(self) -> None:
        inputs = self.traced.graph.find_nodes(op="placeholder")
        loose = {node for node in self.nodes if self._is_loose(node)}
        if [node.target for node in inputs] != list(self.names):
            raise _NotKnown
        self.places = {node: index for index, node in enumerate(inputs)}
        regions = {node: self._region(node, loose) for node in self.nodes if node in loose and not loose.issuperset(node.users)}
        if loose != {node for region in regions.values() for node in region.nodes}:
            raise _NotKnown
        makers = {node: self._dropped_sum(region) or self._kernel(region) for node, region in regions.items()}
        for node in self.nodes:
            if node in makers:
                self._emit(node, makers[node]())
            elif node.op == "call_module" and node not in loose and node not in self.merged:
                self._emit(node, self._call(node))
        (result,) = self.nodes[-1].args
        if not isinstance(result, fx.Node) or self._place(result) != len(self.names) + len(self.steps) - 1:
            raise _NotKnown
        if any(node.op in ("get_attr", "call_function", "call_method") and node not in loose for node in self.nodes):
            raise _NotKnown

    def _part(self, node: fx.Node) -> nn.Module:
        """The part of the module that a node calls."""
        part = self.module._modules.get(str(node.target))
        if part is None:  # deeper inside
            raise _NotKnown
        return part

    def _is_loose(self, node: fx.Node) -> bool:
        """Whether a node may be work of a kernel."""
        if node.op != "call_module":
            return node.op in ("call_function", "call_method")
        part = self._part(node)
        return is_function(part) and not _is_dropout(part) and not isinstance(part, nn.Identity)

    def _region(self, end: fx.Node, loose: set[fx.Node]) -> Region:
        """What makes the value ``end``, from calls of parts that are not loose, and the inputs."""
        inside, inputs, todo = {end}, dict[fx.Node, None](), [end]
        for node in todo:
            for other in node.all_input_nodes:
                if other not in loose:
                    inputs[other] = None
                elif other not in inside:
                    inside.add(other)
                    todo.append(other)
        if any(node is not end and not inside.issuperset(node.users) for node in inside):
            raise _NotKnown
        if not all(isinstance(node.meta.get("val"), torch.Tensor) for node in inputs):
            raise _NotKnown
        ordered = sorted(inside)
        return Region(self.traced, end, ordered, sorted(inputs))

    def _dropped_sum(self, region: Region) -> Callable[[], Step] | None:
        """A residual sum with what a dropout leaves."""
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
        layer = self._layer(source, Region(self.traced, end, [dropout, end], [source]), (dropout,))
        (residual,) = (node for node in region.inputs if node is not dropout)
        start = layer.args[0] if layer is not None else source
        part = str(layer.target) if layer is not None else None
        return lambda: AddDropped(self._place(start), self._place(residual), name, part)

    def _kernel(self, region: Region) -> Callable[[], Step]:
        """Another kernel.

        Raises:
            _NotKnown: none computes it.
        """
        found = region.recognise()
        if found is None:
            raise _NotKnown
        self.found.append((region, found))
        for node in region.nodes:
            if node.op == "call_module":
                self._absorb(node)
        if found.kernel != "bias_act":
            gate, up = (region.inputs[place] for place in found.order)
            return lambda: Gate(found.kernel, self._place(gate), self._place(up), found.options, found.gate_first)
        (source,) = region.inputs
        layer = self._layer(source, region, ())
        start, part = (source, None) if layer is None else (layer.args[0], str(layer.target))
        return lambda: Activate(self._place(start), dict(found.options)["activation"], part)

    def _absorb(self, node: fx.Node) -> None:
        """A function that a region calls."""
        name, (given, *others) = str(node.target), node.args
        if others or node.kwargs or not isinstance(given, fx.Node):
            raise _NotKnown
        self.absorbed[name], self.functions[name] = self._part(node), given.meta["val"].shape[-1]

    def _layer(self, node: fx.Node, region: Region, but: tuple[fx.Node, ...]) -> fx.Node | None:
        """The node, if it calls a layer whose bias may be added by what follows; its call is merged with that then."""
        if node.op != "call_module" or not is_linear(self._part(node)) or not self._is_only_for(node, region, but):
            return None
        if len(node.args) != 1 or node.kwargs or getattr(self._part(node), "bias", None) is None:
            return None
        self.merged.add(node)
        return node

    def _is_only_for(self, node: fx.Node, region: Region, but: tuple[fx.Node, ...]) -> bool:
        """Whether nothing else uses the value, and no part is called in between, which might draw random numbers first."""
        start, end = self.nodes.index(node), self.nodes.index(region.output)
        between = [
            other for other in self.nodes[start + 1 : end] if other.op == "call_module" and other not in (*region.nodes, *but)
        ]
        return set(region.nodes).issuperset(node.users) and not between

    def _call(self, node: fx.Node) -> Call:
        if node.kwargs or not node.args or not isinstance(node.meta.get("val"), torch.Tensor):
            raise _NotKnown
        self._part(node)
        return Call(str(node.target), tuple(self._place(arg) for arg in node.args))

    def _emit(self, node: fx.Node, step: Step) -> None:
        self.places[node] = len(self.names) + len(self.steps)
        self.steps.append(step)

    def _place(self, node: Any) -> int:
        if node not in self.places:
            raise _NotKnown
        return self.places[node]


def _is_dropout(part: nn.Module) -> bool:
    return isinstance(part, nn.Dropout) and type(part).forward is nn.Dropout.forward and not part.inplace


def recognise_experts(module: nn.Module) -> Experts | None:
    """A mixture's experts that compute what a kernel does in ``_apply_gate``, as those of Transformers do."""
    parts = dict(module.named_children())
    names = tensor_inputs(module, "_apply_gate")
    if names is None or len(names) > 1 or not all(map(is_function, parts.values())):
        return None
    found: Found | None = None
    seen = dict[torch.dtype, Steady]()
    with quietly():
        for dtype in DTYPES:
            steady = Steady.of(module, dtype, (_WIDTH,), ELEMENTWISE | HALVES, "_apply_gate")
            gate: Any = bare_copy(module, dtype, training=False)
            now = steady and identify(gate._apply_gate, 1, (6, _WIDTH), dtype, found and {found.kind})
            if steady and now and (not seen or steady.dims == seen[torch.float32].dims):
                found, seen[dtype] = found or now, steady
            elif not seen:
                return None
    reads = {read for steady in seen.values() for read in steady.reads}
    if found is None or found.kernel == "bias_act" or not can_be_compared(module, reads):
        return None
    conditions = Conditions(tuple(seen), seen[torch.float32].dims, tuple(sorted(reads)))
    step = Gate(found.kernel, 0, 0, found.options, found.gate_first)
    return Experts(names, step, conditions, tuple(parts.items()))
