"""Guard on the values of a batch: the program serves it if the forward would take the same branches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from slapo_tracing.graphs import TracedModule
from slapo_tracing.nodes import compile_graph, expect, is_mode_node

from ..assignment.alias_analysis import AliasAnalysis, with_sources


class ValueGuard:
    """Values of the batch that a forward's Python code read during the trace.

    They are recomputed by the nodes that need the batch alone: no parameter, buffer or module. A stage checks the other
    values when it runs.
    """

    def __init__(self, traced: TracedModule, root: nn.Module) -> None:
        self._run: Callable[..., None] | None = None
        self._names: list[str] = []
        nodes = _batch_only_checks(traced.graph, root)
        if nodes:
            self._build(traced, nodes)

    def _build(self, traced: TracedModule, nodes: list[fx.Node]) -> None:
        graph, aliases = fx.Graph(), AliasAnalysis(nodes)
        env: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            copied = env[node] = graph.node_copy(node, env.__getitem__)
            if node.op == "placeholder":
                self._names.append(str(node.target))
                copied.args = ()
            if node.op in ("placeholder", "get_attr") and aliases.mutations_of(node):
                env[node] = graph.call_method("clone", (copied,))  # the batch is the caller's
        graph.output(None)
        constants = {str(node.target): getattr(traced, str(node.target)) for node in nodes if node.op == "get_attr"}
        self._run = partial(compile_graph(graph, "value conditions")[0], SimpleNamespace(**constants))

    def accepts(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the values are the same for a batch of the same shapes."""
        if self._run is None:
            return True
        try:
            with torch.no_grad():
                self._run(*(inputs[name] for name in self._names))
        except Exception:  # another value, or an operation that is valid for the traced values alone
            return False
        return True


def _batch_only_checks(graph: fx.Graph, root: nn.Module) -> list[fx.Node]:
    """Return the checks that the batch alone decides, with all nodes they need, in order."""
    order = [node for node in graph.nodes if not is_mode_node(node)]
    own: set[fx.Node] = set()
    for node in order:
        if _is_batch_only(node, root) and own.issuperset(node.all_input_nodes):
            own.add(node)
    aliases = AliasAnalysis(order)
    found: set[fx.Node] = set()
    for check in order:
        if check in own and check.target is expect:
            needs = _sources_and_mutations(check, aliases, order)
            found |= needs if needs <= own else set()
    return [node for node in order if node in found]


def _is_batch_only(node: fx.Node, root: nn.Module) -> bool:
    if node.op == "get_attr":
        return "." not in str(node.target) and not hasattr(root, str(node.target))
    return node.op in ("placeholder", "call_function", "call_method") and not node.meta.get("draws")


def _sources_and_mutations(check: fx.Node, aliases: AliasAnalysis, order: list[fx.Node]) -> set[fx.Node]:
    """Return a node, its sources, and the nodes that changed any of them in place before it."""
    before = {*itertools.takewhile(lambda node: node is not check, order)}
    return with_sources([check], lambda node: [*node.all_input_nodes, *before.intersection(aliases.mutations_of(node))])
