"""Which nodes of a flat graph may share memory, and which change it in place."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from slapo_core.tracing.calls import function_name

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
            viewed = _viewed(node)
            self._owner[node] = self._owner[viewed] if viewed is not None else node
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
    if function_name(node) in ("setitem", "set_state"):
        return node.all_input_nodes[:1]
    return [node.all_input_nodes[place] for place in node.meta.get("mutates", ())]


def _viewed(node: fx.Node) -> fx.Node | None:
    """The input whose memory the result may lie in."""
    if node.op not in ("call_function", "call_method"):
        return None
    inputs, out = node.all_input_nodes, node.kwargs.get("out")
    if inputs and (function_name(node) in _VIEWS or inputs[0] in changes(node)):
        return inputs[0]
    return out if isinstance(out, fx.Node) else None
