"""Division of the sizes in a graph of a whole module, for a rank that has parts of its layers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..collectives import Group, all_reduce_grad, num_ranks
from ..layouts import Layouts
from .arguments import leaves, with_leaves


def make_local(layouts: Layouts, group: Group) -> None:
    """Let the graph of a dry run give a rank's part of what it gives for the whole module.

    Rewrite:
        x.view(batch, length, heads, width)         -->  x.view(batch, length, heads // ranks, width)
        x.size(2), where a rank has a part of it    -->  x.size(2) * ranks
        scores + bias, where that is whole          -->  scores + part(bias, 1, group)
        scores @ values, where these are whole      -->  scores @ all_reduce_grad(values, group)

    Args:
        layouts: The dry run; its graph is changed.
        group: The tensor-parallel ranks.
    """
    graph, ranks = layouts.graph, layouts.mesh.size()
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target == "size":
            _read_whole(layouts, node)
        with graph.inserting_before(node):
            _take_parts(layouts, node, group)
        if layouts.sized.get(node) and node not in layouts.divided:
            raise ValueError(
                f"sizes {sorted(layouts.sized[node])} of {node.name} ({node.meta.get('source')}) are not its arguments"
            )
        if places := layouts.divided.get(node):
            with graph.inserting_before(node):
                values = leaves((node.args, node.kwargs))
                new = {place: _beside(node, operator.floordiv, values[place], ranks) for place in places}
            node.args, node.kwargs = with_leaves((node.args, node.kwargs), new)
    graph.lint()


def part(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Return this rank's part of a whole tensor; its gradient is zero elsewhere."""
    size = x.size(dim) // num_ranks(group)
    return x.narrow(dim, size * (0 if group is None else group.rank()), size)


def _take_parts(layouts: Layouts, node: fx.Node, group: Group) -> None:
    values = leaves((node.args, node.kwargs))
    new: dict[int, Any] = {}
    for other in layouts.summed_gradients.get(node, ()):
        summed = _made(node, all_reduce_grad, other, group)
        new.update((place, summed) for place, value in enumerate(values) if value is other)
    for place, dim in layouts.cut.get(node, {}).items():
        new[place] = _made(node, part, new.get(place, values[place]), dim, group)
    if new:
        node.args, node.kwargs = with_leaves((node.args, node.kwargs), new)


def _read_whole(layouts: Layouts, node: fx.Node) -> None:
    """Let a size that is read from a shard be that of the whole tensor."""
    source, dim = node.args
    assert isinstance(source, fx.Node)
    value, local = source.meta.get("val"), layouts.local.get(source)
    if not isinstance(value, torch.Tensor) or local is None or value.shape[dim] == local[dim]:  # type: ignore[index]
        return
    with layouts.graph.inserting_after(node):
        whole = _beside(node, operator.mul, node, layouts.mesh.size())
    node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)


def _beside(node: fx.Node, function: Any, value: Any, ranks: int) -> Any:
    """Return a node for a number computed from a node's size, or the number itself."""
    return _made(node, function, value, ranks) if isinstance(value, fx.Node) else function(value, ranks)


def _made(node: fx.Node, function: Any, *args: Any) -> fx.Node:
    made = node.graph.call_function(function, args)
    made.meta.update({key: node.meta[key] for key in ("source", "module", "regions", "is_rewrite") if key in node.meta})
    return made
