"""Replacement of tensor arguments that are prototypes of a shape or dtype: their data is not used, nor their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from slapo_tracing.nodes import function_name

_LIKE_SHAPE = {"view_as": "view", "reshape_as": "reshape"}
_LIKE_TYPE = frozenset(("type_as", "to"))


def without_prototypes(graph: fx.Graph) -> None:
    """Replace the prototype argument of calls by its shape or dtype.

    Rewrite:
        x.view_as(y)             -->  x.view(*sizes of y)
        x.type_as(y) or x.to(y)  -->  x.to(dtype of y)
    """
    for node in graph.find_nodes(op="call_method"):
        name = function_name(node)
        values: list[Any] = [given.meta.get("val") if isinstance(given, fx.Node) else None for given in node.args]
        if node.kwargs or len(values) != 2 or not all(isinstance(value, torch.Tensor) for value in values):
            continue
        if name in _LIKE_SHAPE:
            node.target, node.args = _LIKE_SHAPE[name], (node.args[0], *values[1].shape)
        elif name in _LIKE_TYPE:
            given, prototype = values
            device = () if given.device == prototype.device else (prototype.device,)
            node.target, node.args = "to", (node.args[0], *device, prototype.dtype)
