"""Uses of whole parameters: on sharded values, of which each rank has a part of the gradient, and on whole ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from .layouts import Layouts
from .local_sizes.owners import is_inside
from .node_values import parameters_of


class ParameterUses:
    """Uses of the parameters of a model.

    Args:
        layouts: The dry run of the whole model's flat graph.
    """

    def __init__(self, layouts: Layouts) -> None:
        self._layouts = layouts
        self._ids = {name: id(each) for name, each in layouts.traced.named_parameters(remove_duplicate=False)}
        self._sharded = {(node, self._ids.get(name)) for node, _, names in layouts.mixed for name in names}
        self._made = {node: {self._ids.get(name) for name in parameters_of(node)} for node in layouts.graph.nodes}

    def on_sharded(self, name: str) -> list[fx.Node]:
        """Return the nodes that use a parameter, or one tied to it, on sharded values."""
        return [node for node, number in self._sharded if number == self._ids.get(name)]

    def on_whole(self, name: str) -> fx.Node | None:
        """Return a node that uses a parameter, or one tied to it, on whole values and gives it a gradient; None without one."""
        number = self._ids.get(name)
        return next((node for node in self._uses(number) if (node, number) not in self._sharded), None)

    def _uses(self, number: int | None) -> Iterator[fx.Node]:
        names = [name for name, each in self._ids.items() if each == number]
        layouts = self._layouts
        for node in layouts.graph.nodes:
            value, path = node.meta.get("val"), str(node.target)
            if not isinstance(value, torch.Tensor) or not value.requires_grad or node in layouts.local:
                continue
            is_call = node.op == "call_module" and path not in layouts.splits
            is_made = node.op == "get_attr" or number in self._made[node]
            is_given = not is_made and any(number in self._made[other] for other in node.all_input_nodes)
            if is_given or (is_call and any(is_inside(name, path) for name in names)):
                yield node
