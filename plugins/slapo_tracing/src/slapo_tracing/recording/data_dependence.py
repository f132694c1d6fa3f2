"""Queries of Python code for the values of a tensor, which can be answered if they are the same at every call."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ..nodes.graph_functions import expect
from ..nodes.symbolic_sizes import SIZE
from ..nodes.torch_calls import function_name

_RANDOM = (torch.rand, torch.rand_like)


class ConstantValues:
    """Real values of the nodes that depend only on constants.

    Args:
        graph: The graph under construction; each node runs at most once.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.values: dict[fx.Node, Any] = {}
        self.done: set[fx.Node] = set()
        self.is_unreliable = False

    def of(self, node: fx.Node) -> Any:
        """Return the value of a node, or None if it depends on inputs, weights or random numbers."""
        for other in self.graph.nodes:
            if other not in self.done:
                self.done.add(other)
                self._run(other)
        return None if self.is_unreliable else self.values.get(node)

    def _run(self, node: fx.Node) -> None:
        if SIZE in node.meta:  # the graph is used for calls alone whose own trace gives the same graph
            self.values[node] = node.meta[SIZE]
            return
        known = node.op in ("call_function", "call_method") and self.values.keys() >= {*node.all_input_nodes}
        if not known or node.target is expect:
            # an assignment of something unknown into a known tensor may reach others through views
            self.is_unreliable |= bool(node.meta.get("mutates")) and any(other in self.values for other in node.all_input_nodes)
            return
        args: Any = map_arg(node.args, self.values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, self.values.__getitem__)
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            call: Any = node.target
            if node.op == "call_method":
                call, args = getattr(args[0], str(node.target)), args[1:]
            value = call(*args, **kwargs)
            if torch.equal(before, torch.get_rng_state()):
                self.values[node] = value


def certain_comparison(node: fx.Node) -> bool | None:
    """Return the result of ``torch.rand(...) < p`` if it is the same for all numbers (``p`` is 0 or 1: layer drop is off).

    Returns None for other nodes.
    """
    name = function_name(node)
    if name not in ("lt", "le", "gt", "ge") or len(node.args) != 2:
        return None
    drawn, limit = node.args
    if not isinstance(drawn, fx.Node) or drawn.target not in _RANDOM or not isinstance(limit, (int, float)):
        return None
    compare = getattr(operator, name)
    least, most = compare(0.0, limit), compare(1.0 - 2**-24, limit)
    return bool(least) if least == most else None
