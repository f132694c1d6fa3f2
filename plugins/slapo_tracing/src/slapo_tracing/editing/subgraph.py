"""Subgraphs: their inputs and outputs, and their replacement by one call."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import fx

from slapo_core import ScheduleError

from ..matching.matcher import CompiledPattern, Match, Place
from ..nodes.graph_functions import expect_outputs
from ..nodes.mode_regions import write_mode_nodes
from ..nodes.symbolic_sizes import SIZE


class NewCall(NamedTuple):
    """Call that replaces a subgraph."""

    op: str
    target: Any
    label: str
    layers: tuple[str, ...]


def resolve_nodes(gm: fx.GraphModule, nodes: Sequence[Any]) -> list[fx.Node]:
    """Return the nodes of the present graph that handles stand for; see ``current_node``."""
    return [current_node(gm.graph, node) for _, node in nodes]


NODES_BY_NAME: WeakKeyDictionary[fx.Graph, dict[str, fx.Node]] = WeakKeyDictionary()
"""Nodes of each graph by name. Entries may be stale, see ``current_node``."""


def is_in_graph(graph: fx.Graph, node: fx.Node) -> bool:
    """Return True if a node is in a graph; an erased node still refers to its graph in ``node.graph``."""
    return node.graph is graph and node.prev.next is node


def current_node(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return the node, or that of its name which an undo has recreated; raise ``ScheduleError`` if there is none."""
    if is_in_graph(graph, node):
        return node
    found = NODES_BY_NAME.get(graph, {}).get(node.name)
    if found is None or not is_in_graph(graph, found) or found.name != node.name:
        NODES_BY_NAME[graph] = {other.name: other for other in graph.nodes}
        found = NODES_BY_NAME[graph].get(node.name)
    if found is None:
        raise ScheduleError(f"node {node.name!r} is no longer in the graph; find it again")
    return found


class Subgraph:
    """Nodes of a graph that can become one call, with their inputs and outputs.

    Attributes:
        nodes: The nodes, in graph order.
        inputs: Values from outside.
        outputs: Those nodes whose values are used outside.
        dependents: Nodes outside that stand between the nodes and need an output; they must follow the call.
        pattern: The pattern that the nodes are an occurrence of, if known.
    """

    def __init__(
        self,
        graph: fx.Graph,
        nodes: Iterable[fx.Node],
        inputs: list[Any],
        outputs: list[fx.Node],
        pattern: CompiledPattern | None = None,
    ) -> None:
        self.graph, self.nodes, self.inputs, self.outputs, self.pattern = graph, sorted(nodes), inputs, outputs, pattern
        self.inside = set(self.nodes)
        if not self.outputs:
            raise ScheduleError("nothing uses the results of the subgraph; it can be left out of the model instead")
        for node in self.nodes:
            self._check(node)
        if len({node.meta.get("regions", ()) for node in self.nodes}) > 1:
            raise ScheduleError("the subgraph is partly inside a no_grad or autocast region; take nodes of one region")
        self.dependents = self._dependents()

    @classmethod
    def of(cls, graph: fx.Graph, nodes: Sequence[Any]) -> Subgraph:
        """Return the subgraph of a match, or of handles of nodes."""
        now = [current_node(graph, node) for _, node in nodes]
        if isinstance(nodes, Match):
            known = dict(zip((node for _, node in nodes), now, strict=True))
            given = [known[v.node].all_input_nodes[v.number] if isinstance(v, Place) else v for v in nodes.inputs]
            return cls(graph, now, given, [known[node] for node in nodes.outputs], nodes.pattern)
        inputs = dict.fromkeys(other for node in sorted(now) for other in node.all_input_nodes)
        outside = [node for node in sorted(now) if any(user not in now for user in node.users)]
        return cls(graph, now, [other for other in inputs if other not in now], outside)

    def replace(self, call: NewCall, made: list[fx.Node]) -> None:
        """Replace the nodes by a call. ``made`` gets the new nodes: first those of ``call.layers``, then the call."""

        def create(op: str, target: Any, args: tuple[Any, ...] = (), name: str | None = None) -> fx.Node:
            with self.graph.inserting_after([self.nodes[-1], *made][-1]):
                made.append(self.graph.create_node(op, target, args, {}, name))
            made[-1].meta["is_rewrite"] = True
            return made[-1]

        def insert(op: str, target: Any, args: tuple[Any, ...], name: str | None, like: fx.Node) -> fx.Node:
            node = create(op, target, args, name)
            node.meta.update({key: like.meta[key] for key in ("source", "regions", "val") if key in like.meta})
            return node

        layers = [create("get_attr", path) for path in call.layers]
        node = insert(call.op, call.target, (*self.inputs, *layers), call.label, self.outputs[0])
        results = [node]
        if len(self.outputs) > 1:
            node.meta.pop("val", None)
            get = operator.getitem
            insert("call_function", expect_outputs, (node, len(self.outputs), call.label), None, self.outputs[0])
            made[-1].meta.pop("val", None)
            results = [insert("call_function", get, (node, index), None, out) for index, out in enumerate(self.outputs)]
        for late, place in zip(self.dependents, [made[-1], *self.dependents], strict=False):
            place.append(late)
        for output, result in zip(self.outputs, results, strict=True):
            output.replace_all_uses_with(result, delete_user_cb=lambda user: user not in self.inside)
        for each in reversed(self.nodes):
            self.graph.erase_node(each)
        if self.dependents:
            write_mode_nodes(self.graph)

    def _check(self, node: fx.Node) -> None:
        if not node.op.startswith("call"):
            raise ScheduleError(f"node {node.name!r} is a {node.op}; a subgraph consists of operations and module calls")
        outside = [user.name for user in node.users if user not in self.inside]
        if outside and node not in self.outputs:
            what = f"the value {node.name!r} inside the subgraph is also used outside, by {outside[0]!r}"
            raise ScheduleError(f"{what}; make it an output of the pattern")
        for other in node.all_input_nodes:
            if other not in self.inside and other not in self.inputs and SIZE not in other.meta:  # the match knows sizes
                what = f"the subgraph also needs the value {other.name!r}, which is not an argument of the pattern"
                raise ScheduleError(f"{what}; make it one")

    def _dependents(self) -> list[fx.Node]:
        span = [self.nodes[0]]
        while span[-1] is not self.nodes[-1]:
            span.append(span[-1].next)
        late: dict[fx.Node, None] = {}
        for node in span:
            needed = [other for other in node.all_input_nodes if other in late]
            if node in self.inside and needed:
                what = f"a result of the subgraph comes back into it over nodes outside, at {node.name!r}"
                raise ScheduleError(f"{what}; include those nodes")
            if needed or (node not in self.inside and any(output in node.all_input_nodes for output in self.outputs)):
                late[node] = None
        for value in self.inputs:
            if isinstance(value, fx.Node) and (value in late or value in self.inside):
                what = f"the input {value.name!r} is made from a result of the subgraph"
                raise ScheduleError(f"{what}; include the nodes between")
        if len(span) > len(self.nodes) and any(node.meta.get("mutates") for node in span):
            raise ScheduleError("an operation in place keeps the subgraph from being one call; take fewer nodes")
        return list(late)

    def prefix(self) -> str:
        """Return the path of the innermost module that contains every module that the nodes call."""
        parents = [str(node.target).split(".")[:-1] for node in self.nodes if node.op == "call_module"]
        return ".".join(os.path.commonprefix(parents))
