"""Structure of the graph of a traced module, without the names of its values and the numbers of its layers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import fx, nn

from slapo_tracing.nodes import module_signature


def graph_signature(module: nn.Module) -> Hashable | None:
    """Return what decides the work of a traced module: its operations in order, and the modules that they call.

    Equal for stages that differ in the numbers of their layers, and in weights. None for a module without a graph.
    """
    graph = getattr(module, "graph", None)
    if not isinstance(graph, fx.Graph):
        return None
    places = {node: index for index, node in enumerate(graph.nodes)}

    def place(node: fx.Node) -> Any:
        return f"%{places[node]}"

    return (
        module_signature(module),
        tuple((node.op, _target(node), repr(fx.map_arg((node.args, node.kwargs), place))) for node in graph.nodes),
    )


def _target(node: fx.Node) -> Hashable:
    if node.op in ("placeholder", "output"):
        return ""
    if isinstance(node.target, str):
        return ".".join("#" if part.isdigit() else part for part in node.target.split("."))
    return node.target
