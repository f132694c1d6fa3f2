"""Which nodes of a flat graph share memory, and which change it in place."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from slapo_tracing.nodes import function_name


class AliasAnalysis:
    """What the nodes of one graph have in common, as it was when they were recorded.

    Args:
        nodes: All nodes in the order in which they run.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        order = list(nodes)
        self._of: dict[fx.Node, set[int]] = {node: {node.meta["memory"]} if "memory" in node.meta else set() for node in order}
        for node in reversed(order):
            if not self._of[node]:  # a list or an object: that of its parts, where it has any
                self._of[node] = {
                    memory for user in node.users if is_container_item(user) for memory in self._of.get(user, ())
                } or {id(node)}
        self.changed: dict[int, list[fx.Node]] = {}
        """Memory to the nodes that change it."""
        self.reads = [node for node in order if node.op == "get_attr"]
        """Nodes that read parameters and buffers."""
        for node in order:
            for memory in self.touched_by([node]):
                self.changed.setdefault(memory, []).append(node)

    def of(self, node: fx.Node) -> set[int]:
        """Numbers of the memory that this node's value lies in."""
        return self._of[node]

    def changes_of(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that change the memory of this one's value, at any time."""
        return [other for memory in self._of[node] for other in self.changed.get(memory, ())]

    def touched_by(self, nodes: Iterable[fx.Node]) -> set[int]:
        """The memory that some of these nodes change."""
        return {memory for node in nodes for other in mutated_values(node) for memory in self._of[other]}


def mutated_values(node: fx.Node) -> list[fx.Node]:
    """The values that running this node changes in place."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    if function_name(node) in ("setitem", "set_state"):
        return node.all_input_nodes[:1]
    changed = [node.all_input_nodes[place] for place in node.meta.get("mutates", ())]
    for value in changed:
        changed += [part for part in _contained_values(value) if part not in changed]
    return changed


def _contained_values(node: fx.Node) -> list[fx.Node]:
    """The values that an object was made of and those that were put into it."""
    later = [part for user in node.users if function_name(user) == "set_state" for part in user.all_input_nodes]
    return [*later, *node.all_input_nodes] if function_name(node) == "rebuild" else later


def is_container_item(node: fx.Node) -> bool:
    """Whether the node takes a part out of a value that is no tensor."""
    if node.op != "call_function" or node.target not in (operator.getitem, getattr):
        return False
    return isinstance(node.args[0], fx.Node) and "val" not in node.args[0].meta
