"""Comparison of graphs as data, and the correspondence between the nodes of two graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from .nested_values import fingerprint


class _Index(int):
    """Position of a node in its graph, as a reference to the node."""


class _Constant:
    """Tensor that the graph holds, compared by value."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Constant):
            return False
        one, two = self.tensor, other.tensor
        same = (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
        return one is two or (same and not one.is_meta and torch.equal(one, two))

    def __hash__(self) -> int:
        return hash((self.tensor.shape, self.tensor.dtype))


def graph_data(graph: fx.Graph, constants: Any) -> list[Any]:
    """Return a graph as data that can be compared, copied and pickled: for each node its name, target and arguments.

    ``constants`` is the module that holds the tensors of ``_tensor_constant`` nodes, or a mapping that has them.
    """
    place = {node: _Index(index) for index, node in enumerate(graph.nodes)}
    held = constants if isinstance(constants, Mapping) else constants._buffers

    def called_target(node: fx.Node) -> Any:
        constant = held.get(str(node.target)) if node.op == "get_attr" and "_tensor_constant" in str(node.target) else None
        return node.target if constant is None else _Constant(constant)

    return [
        (
            node.name if node.op != "placeholder" else str(node.target),
            (node.op, called_target(node) if node.op not in ("placeholder", "output") else None, node.meta.get("module", "")),
            map_arg((node.args, node.kwargs), lambda other: place[other]),
            node.meta.get("draws", False),
        )
        for node in graph.nodes
    ]


def same_graph(one: list[Any] | None, two: list[Any] | None) -> bool:
    """Return True if two graphs compute the same, operation by operation."""
    if one is None or two is None or len(one) != len(two):
        return False
    for (name, called, args, _), (other, also, given, _) in zip(one, two, strict=True):
        if called != also or (called[0] == "placeholder" and name != other):
            return False
        if fingerprint(args, id) != fingerprint(given, id):
            return False
    return True


class Twins(dict[str, fx.Node]):
    """Name of a node of the first graph to the corresponding node of another graph. Nodes without one are left out.

    Nodes that call the same function from the same module are paired in order if both graphs have equally many.

    Attributes:
        unique: Names of the nodes whose twin is certain, since no other node calls the same.
    """

    def __init__(self, first: list[Any], graph: fx.Graph) -> None:
        super().__init__()
        nodes = list(graph.nodes)
        ours, theirs = _call_positions(first), _call_positions(graph_data(graph, {}))
        alike = [(here, theirs[key]) for key, here in ours.items() if len(here) == len(theirs.get(key, ()))]
        self.update((first[one][0], nodes[other]) for here, there in alike for one, other in zip(here, there, strict=True))
        self.unique = {first[here[0]][0] for here, _ in alike if len(here) == 1}


def _call_positions(data: list[Any]) -> dict[Any, list[int]]:
    """Return the positions at which each operation is called."""
    places: dict[Any, list[int]] = {}
    for place, (name, called, *_) in enumerate(data):
        places.setdefault((called, name if called[0] == "placeholder" else ""), []).append(place)
    return places
