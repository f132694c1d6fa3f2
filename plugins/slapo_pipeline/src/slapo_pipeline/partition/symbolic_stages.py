"""Stages of a traced model whose example inputs nobody gave: its graphs, divided at the cuts.

Nothing is known of the values: each operation runs once, in the stage that its place gives it, and whatever a later stage uses
is sent. The plan shows the stages and which parameters each has. A batch, once there is one, makes a plan with shapes.
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
from .module_tree import prune_tree
from .stage_module import StageGuard, stage_graph

_UNKNOWN = torch.empty(1, device="meta", requires_grad=True)
"""Stands for every value."""


@dataclass
class AnyShapeGuard(StageGuard):
    """Takes values of every shape; see ``StageGuard``."""

    def check(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the graph's inputs; ``TraceError`` where one is missing, or in the other mode."""
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
    """Return the nodes of the model's graphs by stages.

    Args:
        root: The model; modules around a cut that have no graph are traced by ``torch.fx``.
        cuts: Paths of the modules that end a stage.

    Raises:
        BuildError: a forward that takes example inputs to trace.
        ScheduleError: a cut leaves a stage without anything to run.
    """
    graph = _FlatGraph(root, inlined_paths(cuts)).graph
    return Assigner(graph, root, [position for position, _ in cut_positions(root, graph, cuts)]).run()


def symbolic_stage(root: nn.Module, parts: Assignment, index: int, keep: set[str]) -> TracedModule:
    """Return the module of a stage.

    Args:
        root: The model.
        parts: How its graphs come apart.
        index: Of the stage.
        keep: Paths of the modules, parameters and buffers it holds.
    """
    names = [node.name for node in parts.received[index]]
    graph, batch = stage_graph(parts, index, names)
    received = tuple((name, (), _UNKNOWN.dtype) for name in names)
    guard = AnyShapeGuard(index, received, dict.fromkeys(batch), root.training, autocast_state(), None, None)
    return TracedModule(prune_tree(root, keep), graph, guard)


class _FlatGraph:
    """One graph of a model, down to the modules that no cut lies in.

    Args:
        root: The model.
        opened: Paths of the modules whose graphs become part of it.
    """

    def __init__(self, root: nn.Module, opened: set[str]) -> None:
        self.root, self.opened, self.graph = root, opened, fx.Graph()
        graph = root.graph if isinstance(root, fx.GraphModule) else self._traced(root, "", None)
        values = {node: self._argument(node) for node in graph.find_nodes(op="placeholder")}
        self.graph.output(self._copy(graph, values, "", ()))

    def _argument(self, node: fx.Node) -> fx.Node:
        if str(node.target).startswith("*"):
            raise _refusal(f"the forward of {type(self.root).__name__} takes {node.target}")
        return self.graph.node_copy(node)

    def _traced(self, module: nn.Module, path: str, call: Any) -> fx.Graph:
        """The graph of a module's forward, for a call if one is given."""
        try:
            return trace(module, example_inputs=call, recursive=False, tracer="fx").graph
        except TraceError as err:
            what = f"the {type(module).__name__}{f' at {path!r}' if path else ''} cannot be traced without example inputs"
            raise _refusal(what) from err

    def _copy(self, graph: fx.Graph, values: dict[fx.Node, Any], path: str, regions: tuple[Any, ...]) -> Any:
        """Add a graph's nodes; returns its result."""
        for node in graph.nodes:
            if node.op == "output":
                return map_arg(node.args[0], values.__getitem__)
            if node.op != "placeholder" and not is_mode_node(node) and node.target not in (expect, expect_outputs):
                values[node] = self._added(node, values, path, regions)
        raise AssertionError("a graph without an output")

    def _added(self, node: fx.Node, values: Mapping[fx.Node, Any], path: str, regions: tuple[Any, ...]) -> Any:
        args: Any
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.target in (operator.getitem, getattr) and not isinstance(args[0], fx.Node):
            return node.target(*args)  # a part of what an opened module returns
        around = (*regions, *node.meta.get("regions", ()))
        target = f"{path}.{node.target}" if path and node.op in ("call_module", "get_attr") else node.target
        if node.op == "call_module" and target in self.opened:
            return self._called(str(target), args, kwargs, around)
        added = self.graph.create_node(node.op, target, args, kwargs, node.name)
        known = {"draws": True, **({} if node.op == "get_attr" else {"val": _UNKNOWN})}
        added.meta = {**node.meta, **known, "module": path, "regions": around}
        return added

    def _called(self, path: str, args: Any, kwargs: Any, regions: tuple[Any, ...]) -> Any:
        """Add the graph of a module that is called; one that was traced for another call is traced for this one."""
        module = self.root.get_submodule(path)
        guard = guard_of(module)
        given = argument_values(guard.parameters if guard is not None else plain_signature(module), args, kwargs)
        inputs = {name for name, value in given.items() if isinstance(value, fx.Node)}
        graph = module.graph if isinstance(module, fx.GraphModule) else None
        if graph is None or not inputs <= _arguments(graph).keys() <= given.keys():
            graph = self._traced(module, path, map_arg((args, kwargs), lambda node: _UNKNOWN))
        return self._copy(graph, {node: given[name] for name, node in _arguments(graph).items()}, path, regions)


def _arguments(graph: fx.Graph) -> dict[str, fx.Node]:
    return {str(node.target): node for node in graph.find_nodes(op="placeholder")}


def _refusal(what: str) -> BuildError:
    return BuildError(f"{what}; give create_schedule example_inputs=, one batch, and the model is traced for its cuts")
