"""Alias analysis of a flat graph: the nodes that share memory, and those that change it in place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

from torch import fx

from slapo_tracing.nodes import function_name


class AliasAnalysis:
    """The memory that each node's value occupies, as recorded by the trace."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        order = list(nodes)
        self._memory: dict[fx.Node, set[int]] = {
            node: {node.meta["memory"]} if "memory" in node.meta else set() for node in order
        }
        for node in reversed(order):
            if not self._memory[node]:  # a container holds no tensor itself: it occupies the memory of its items
                self._memory[node] = {
                    memory for user in node.users if is_container_item(user) for memory in self._memory.get(user, ())
                } or {id(node)}
        self.mutations: dict[int, list[fx.Node]] = {}
        """Number of a memory to the nodes that change it."""
        self.reads = [node for node in order if node.op == "get_attr"]
        """Nodes that read parameters and buffers."""
        for node in order:
            for memory in self.memory_mutated_by([node]):
                self.mutations.setdefault(memory, []).append(node)

    def memory_of(self, node: fx.Node) -> set[int]:
        """Return the numbers of the memory that the node's value occupies; a container occupies several."""
        return self._memory[node]

    def mutations_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that change the memory of this node's value, before it or after it."""
        return [other for memory in self._memory[node] for other in self.mutations.get(memory, ())]

    def memory_mutated_by(self, nodes: Iterable[fx.Node]) -> set[int]:
        """Return the numbers of the memory that any of these nodes changes."""
        return {memory for node in nodes for other in mutated_values(node) for memory in self._memory[other]}


def with_sources(nodes: Iterable[fx.Node], sources: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Return these nodes and all that they are computed from; ``sources`` gives the nodes to follow from one of them."""
    found: set[fx.Node] = set()
    work = list(nodes)
    while work:
        node = work.pop()
        if node not in found:
            found.add(node)
            work += sources(node)
    return found


def mutated_values(node: fx.Node) -> list[fx.Node]:
    """Return the values that this node changes in place."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    if function_name(node) in ("setitem", "set_state"):
        return node.all_input_nodes[:1]
    mutated = [node.all_input_nodes[place] for place in node.meta.get("mutates", ())]
    for value in mutated:
        mutated += [part for part in _contained_values(value) if part not in mutated]
    return mutated


def _contained_values(node: fx.Node) -> list[fx.Node]:
    """Return the values that an object was built from, and those assigned to it later."""
    later = [part for user in node.users if function_name(user) == "set_state" for part in user.all_input_nodes]
    return [*later, *node.all_input_nodes] if function_name(node) == "rebuild" else later


def is_container_item(node: fx.Node) -> bool:
    """Return whether the node takes an item out of a value that is not a tensor."""
    if node.op != "call_function" or node.target not in (operator.getitem, getattr):
        return False
    return isinstance(node.args[0], fx.Node) and "val" not in node.args[0].meta
