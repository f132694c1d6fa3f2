"""Which nodes of a flat graph may share memory, and which change it in place."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

_VIEWS = frozenset(
    (
        *("view", "view_as", "reshape", "reshape_as", "expand", "expand_as", "flatten", "unflatten", "contiguous", "detach"),
        *("getitem", "setitem", "narrow", "select", "chunk", "split", "unbind", "diagonal", "squeeze", "unsqueeze"),
        *("transpose", "permute", "movedim", "swapaxes", "t", "T", "mT"),
        *("to", "type", "float", "half", "long", "int", "bool"),
    )
)
"""Functions whose result may be a view of their first argument, or that argument itself."""


class Memory:
    """What the nodes of one graph have in common.

    Args:
        nodes: All nodes in the order in which they run.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._owner: dict[fx.Node, fx.Node] = {}
        self.changed: dict[fx.Node, list[fx.Node]] = {}
        """Owner of memory to the nodes that change it."""
        for node in nodes:
            inputs = node.all_input_nodes
            self._owner[node] = self._owner[inputs[0]] if inputs and _may_be_view(node) else node
            for other in changes(node):
                self.changed.setdefault(self.owner(other), []).append(node)

    def owner(self, node: fx.Node) -> fx.Node:
        """The node that made the memory this one's value may lie in."""
        return self._owner[node]

    def touched_by(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Owners of the memory that some of these nodes change."""
        return {self.owner(other) for node in nodes for other in changes(node)}


def changes(node: fx.Node) -> list[fx.Node]:
    """The values that running this node changes in place."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    if not (node.meta.get("mutates") or function_name(node) in ("setitem", "set_state")):
        return []
    return node.all_input_nodes if node.op == "call_module" else node.all_input_nodes[:1]


def function_name(node: fx.Node) -> str:
    """The plain name of the function or method a node calls."""
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def _may_be_view(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    return function_name(node) in _VIEWS or bool(changes(node))
