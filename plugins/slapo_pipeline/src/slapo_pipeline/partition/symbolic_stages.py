"""Stages of a model without example inputs: the graphs of ``torch.fx``, divided at the cuts.

Shapes and dtypes are unknown. Each node runs once, in the stage of its position, and each value that a later stage uses is
sent. The program shows the stages and their parameters; the first batch makes a program with shapes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from slapo_core import BuildError, TraceError
from slapo_tracing import trace
from slapo_tracing.graphs import TracedModule, argument_values, guard_of, plain_signature
from slapo_tracing.nodes import autocast_state, expect, expect_outputs, is_mode_node

from ..assignment.node_assignment import Assigner, Assignment
from ..tracing.flat_trace import cut_positions, inlined_paths
from .stage_module import StageGuard, prune_tree, stage_graph

_UNKNOWN = torch.empty(1, device="meta", requires_grad=True)
"""Placeholder for every value of the graphs."""


@dataclass
class AnyShapeGuard(StageGuard):
    """Guard of a stage that admits values of any shape; see ``StageGuard``."""

    def check(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the graph's inputs; raise ``TraceError`` if one is missing, or in the other mode."""
        if module.training != self.training:
            raise TraceError(
                f"stage {self.index} was made in {'train' if self.training else 'eval'} mode; call the whole model"
            )
        names = [*(name for name, *_ in self.received), *self.batch]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or values.keys() != set(names):
            raise TraceError(f"stage {self.index} takes {', '.join(names)}; give these")
        return values


def symbolic_assignment(root: nn.Module, cuts: Sequence[str]) -> Assignment:
    """Return the assignment of the model's graphs to stages that end at ``cuts``.

    Modules around a cut that have no graph are traced by ``torch.fx``.

    Raises:
        BuildError: a forward cannot be traced without example inputs.
        ScheduleError: a cut leaves a stage with no node to run.
    """
    graph = _FlatGraph(root, inlined_paths(cuts)).graph
    return Assigner(graph, root, [position for position, _ in cut_positions(root, graph, cuts)]).run()


def symbolic_stage(root: nn.Module, assignment: Assignment, index: int, keep: set[str]) -> TracedModule:
    """Return the module of a stage, which holds the modules, parameters and buffers of the paths ``keep``."""
    names = [node.name for node in assignment.received[index]]
    graph, batch = stage_graph(assignment, index, names)
    received = tuple((name, (), _UNKNOWN.dtype) for name in names)
    guard = AnyShapeGuard(index, received, dict.fromkeys(batch), root.training, autocast_state(), None, None)
    return TracedModule(prune_tree(root, keep), graph, guard)


class _FlatGraph:
    """The flat graph of a model: modules without a cut inside are one node each, but for the ``inlined`` paths."""

    def __init__(self, root: nn.Module, inlined: set[str]) -> None:
        self.root, self.inlined, self.graph = root, inlined, fx.Graph()
        graph = root.graph if isinstance(root, fx.GraphModule) else self._trace_forward(root, "", None)
        values = {node: self._argument(node) for node in graph.find_nodes(op="placeholder")}
        self.graph.output(self._copy(graph, values, "", ()))

    def _argument(self, node: fx.Node) -> fx.Node:
        if str(node.target).startswith("*"):
            raise _refusal(f"the forward of {type(self.root).__name__} takes {node.target}")
        return self.graph.node_copy(node)

    def _trace_forward(self, module: nn.Module, path: str, call: Any) -> fx.Graph:
        """Trace a module's forward, for a call if one is given."""
        try:
            return trace(module, example_inputs=call, recursive=False, tracer="fx").graph
        except TraceError as err:
            what = f"the {type(module).__name__}{f' at {path!r}' if path else ''} cannot be traced without example inputs"
            raise _refusal(what) from err

    def _copy(self, graph: fx.Graph, values: dict[fx.Node, Any], path: str, regions: tuple[Any, ...]) -> Any:
        """Copy a graph's nodes into the flat graph; return its result."""
        for node in graph.nodes:
            if node.op == "output":
                return map_arg(node.args[0], values.__getitem__)
            if node.op != "placeholder" and not is_mode_node(node) and node.target not in (expect, expect_outputs):
                values[node] = self._add_node(node, values, path, regions)
        raise AssertionError("a graph without an output")

    def _add_node(self, node: fx.Node, values: Mapping[fx.Node, Any], path: str, regions: tuple[Any, ...]) -> Any:
        args: Any
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.target in (operator.getitem, getattr) and not isinstance(args[0], fx.Node):
            return node.target(*args)  # an item of an inlined module's result
        around = (*regions, *node.meta.get("regions", ()))
        target = f"{path}.{node.target}" if path and node.op in ("call_module", "get_attr") else node.target
        if node.op == "call_module" and target in self.inlined:
            return self._inline_call(str(target), args, kwargs, around)
        added = self.graph.create_node(node.op, target, args, kwargs, node.name)
        # without shapes nothing may be recomputed: a node that draws random numbers runs once
        known = {"draws": True, **({} if node.op == "get_attr" else {"val": _UNKNOWN})}
        added.meta = {**node.meta, **known, "module": path, "regions": around}
        return added

    def _inline_call(self, path: str, args: Any, kwargs: Any, regions: tuple[Any, ...]) -> Any:
        """Inline the graph of a module that is called; trace it again if its graph takes other arguments."""
        module = self.root.get_submodule(path)
        guard = guard_of(module)
        given = argument_values(guard.parameters if guard is not None else plain_signature(module), args, kwargs)
        inputs = {name for name, value in given.items() if isinstance(value, fx.Node)}
        graph = module.graph if isinstance(module, fx.GraphModule) else None
        if graph is None or not inputs <= _arguments(graph).keys() <= given.keys():
            graph = self._trace_forward(module, path, map_arg((args, kwargs), lambda node: _UNKNOWN))
        return self._copy(graph, {node: given[name] for name, node in _arguments(graph).items()}, path, regions)


def _arguments(graph: fx.Graph) -> dict[str, fx.Node]:
    return {str(node.target): node for node in graph.find_nodes(op="placeholder")}


def _refusal(what: str) -> BuildError:
    return BuildError(f"{what}; give create_schedule example_inputs=, one batch, and the model is traced for its cuts")
