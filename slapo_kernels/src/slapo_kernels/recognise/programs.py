"""Small modules whose forward is calls of their parts and kernels between them: MLPs, and what follows a sub-layer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from slapo_core.errors import TraceError
from slapo_core.operators import operator_of
from slapo_core.tracing import TracedModule, trace_module

from ..swapped import Activate, AddDropped, Call, Experts, Gate, Program, Step
from .copies import bare_copy, is_function, is_linear
from .regions import Region, identify
from .signatures import tensor_inputs

_MOST = 16
"""Parts that a module may have in it; more than that is a model."""


class _Case(NamedTuple):
    """What a forward is traced with: dtype of weights and inputs, or None for the module's own; mode; batch."""

    dtype: torch.dtype | None
    training: bool
    batch: tuple[int, ...]


_FIRST = _Case(torch.float32, True, (2, 3))
_OTHERS = (_Case(torch.bfloat16, False, (4, 1)), _Case(torch.bfloat16, False, (5,)))


def recognise_program(module: nn.Module) -> Program | None:
    """The program that computes what the module does, in both modes and whatever the batch; None where none is known."""
    names = tensor_inputs(module)
    if names is None or len(names) > 2 or not module._modules or not _is_small(module):
        return None
    traced = _trace(module, names, _FIRST)
    first = traced and _program_of(traced, module, names)
    if not first or not first.kernels:
        return None
    others = [(case, _trace(module, names, case)) for case in _OTHERS]
    if all(traced is None for _, traced in others):
        return None
    dtypes = {tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()}
    if len(dtypes) > 1:  # where the module casts between them, it is no program
        others.append((_Case(None, True, (2, 3)), _trace(module, names, _Case(None, True, (2, 3)))))
        if others[-1][1] is None:
            return None
    same = all(_program_of(traced, module, names, first) == first for _, traced in others if traced is not None)
    return first if same else None


def _is_small(module: nn.Module) -> bool:
    inside = list(module.modules())[1:]
    return len(inside) <= _MOST and all(_is_known(part) for part in inside)


def _is_known(module: nn.Module) -> bool:
    """A part whose forward can be run on tensors without numbers: a layer, a norm, a function, or made of these."""
    if isinstance(module, fx.GraphModule) or module._buffers:
        return False
    return is_linear(module) or all(tensor is None or tensor.dim() <= 1 for tensor in module._parameters.values())


def _trace(module: nn.Module, names: tuple[str, ...], case: _Case) -> TracedModule | None:
    """The forward's graph on inputs of the widths that it takes; None where it takes no such batch."""
    copied = bare_copy(module, case.dtype, case.training)
    own = dict.fromkeys(tensor.dtype for tensor in module.parameters() if tensor.is_floating_point())
    for dtype in own if case.dtype is None else (case.dtype,):
        for widths in product(_widths(module), repeat=len(names)):
            inputs = tuple(torch.empty(*case.batch, width, dtype=dtype, device="meta") for width in widths)
            try:
                return trace_module(copied, inputs, leaf=lambda path, child: True)
            except TraceError:
                continue
    return None


def _widths(module: nn.Module) -> list[int]:
    """Numbers of features that the module's layers take or return."""
    found: dict[int, None] = {}
    for part in module.modules():
        shapes = [tensor.shape for tensor in part._parameters.values() if tensor is not None]
        found.update(dict.fromkeys(size for shape in shapes for size in shape))
    return list(found)


def _program_of(
    traced: TracedModule, module: nn.Module, names: tuple[str, ...], expected: Program | None = None
) -> Program | None:
    try:
        return _Reading(traced, module, names, expected).program()
    except _NotKnown:
        return None


class _NotKnown(Exception):
    """The graph has something in it that no program has."""


class _Reading:
    """A graph as a program.

    Args:
        traced: The graph, of a bare copy.
        module: The module itself.
        names: Of its arguments.
        expected: The only program it may be.
    """

    def __init__(self, traced: TracedModule, module: nn.Module, names: tuple[str, ...], expected: Program | None) -> None:
        self.traced, self.module, self.names, self.expected = traced, module, names, expected
        self.nodes: list[fx.Node] = list(traced.graph.nodes)
        self.places: dict[fx.Node, int] = {}
        self.steps: list[Step] = []
        self.absorbed: dict[str, nn.Module] = {}
        self.merged: set[fx.Node] = set()
        """Calls that the step of a kernel makes."""

    def program(self) -> Program:
        """The program.

        Raises:
            _NotKnown: there is none.
        """
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
        return Program(self.names, tuple(self.steps), tuple(self.absorbed.items()))

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
        kinds = (
            None if self.expected is None else {step.kind for step in self.expected.steps if isinstance(step, (Activate, Gate))}
        )
        found = region.recognise(kinds)
        if found is None:
            raise _NotKnown
        for node in region.nodes:
            if node.op == "call_module":
                self.absorbed[str(node.target)] = self._part(node)
        if found.kernel != "bias_act":
            gate, up = (region.inputs[place] for place in found.order)
            return lambda: Gate(found.kernel, self._place(gate), self._place(up), found.options, found.gate_first)
        (source,) = region.inputs
        layer = self._layer(source, region, ())
        start, part = (source, None) if layer is None else (layer.args[0], str(layer.target))
        return lambda: Activate(self._place(start), dict(found.options)["activation"], part)

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
    if not hasattr(type(module), "_apply_gate") or not all(map(is_function, parts.values())):
        return None
    found = None
    for dtype, training, shape in ((torch.float32, True, (6, 16)), (torch.bfloat16, False, (3, 32))):
        copied = bare_copy(module, dtype, training)
        gate: Any = copied._apply_gate
        found = identify(gate, 1, shape, dtype, None if found is None else {found.kind})
        if found is None or found.kernel == "bias_act":
            return None
    return found and Experts(Gate(found.kernel, 0, 0, found.options, found.gate_first), tuple(parts.items()))
