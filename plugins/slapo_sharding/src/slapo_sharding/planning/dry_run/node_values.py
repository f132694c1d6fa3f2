"""Facts about the values of graph nodes, and operations that DTensor has no rule for."""

from __future__ import annotations

import math
import operator
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.utils import _pytree as pytree


class UnknownObject:
    """Placeholder for a result that cannot be computed without data; every item and attribute of it is a placeholder too."""

    def __getattr__(self, name: str) -> UnknownObject:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, index: Any) -> UnknownObject:
        return self


def as_meta(value: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same shape, strides and dtype."""
    if value.is_meta and type(value) is torch.Tensor:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def has_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.requires_grad


def has_any_gradient(node: fx.Node) -> bool:
    """Return whether a value, or one of the tensors taken out of it, has a gradient."""
    return has_gradient(node) or any(
        user.target is operator.getitem and user.args[0] is node and has_gradient(user) for user in node.users
    )


def parameters_of(node: fx.Node) -> list[str]:
    """Return the names of the parameters that a value is computed from; empty if anything else with a gradient enters it."""
    names: list[str] = []
    pending, seen = [node], {node}
    while pending:  # a recursion would be as deep as the model
        each = pending.pop()
        if each.op == "get_attr":
            names.append(str(each.target))
            continue
        inputs = [other for other in each.all_input_nodes if has_any_gradient(other)]
        if each.op in ("placeholder", "call_module") or not inputs:
            return []
        pending += [other for other in reversed(inputs) if other not in seen]
        seen.update(inputs)
    return names


def run_by_heads(name: str, args: Any, kwargs: Any) -> DTensor | torch.Tensor:
    """Compute an operation without a DTensor rule that needs no data of other ranks.

    Three cases are covered. A matmul with repeated batch dimensions runs as an einsum. In attention, one whole key and value
    head serves all query heads of a rank. A view that splits one dimension and merges the next runs as two views.

    Raises:
        RuntimeError: the operation is none of these.
    """
    if name in ("view", "reshape") and not kwargs and isinstance(args[0], DTensor):
        return view_in_two_steps(name, args[0], *args[1:])
    if name == "matmul" and not kwargs and min(each.dim() for each in args) > 1:
        batch = "abcdefgh"[: max(each.dim() for each in args) - 2]
        left, right = (batch[len(batch) - each.dim() + 2 :] for each in args)
        return torch.einsum(f"{left}ij,{right}jk->{batch}ik", *args)
    if name != "scaled_dot_product_attention" or len(args) < 3:
        raise RuntimeError("DTensor has no rule")
    query, key, value, *_ = args
    is_split = isinstance(query, DTensor) and query.placements == (Shard(query.dim() - 3),)
    if not is_split or any(isinstance(each, DTensor) or each.shape[-3] != 1 for each in (key, value)):
        raise RuntimeError("more than one head of keys")
    local = query.to_local()
    repeated = (each.expand(*each.shape[:-3], local.shape[-3], *each.shape[-2:]) for each in (key, value))
    result = F.scaled_dot_product_attention(local, *repeated)
    return DTensor.from_local(result, query.device_mesh, query.placements, run_check=False)


def view_in_two_steps(name: str, x: DTensor, *sizes: Any) -> DTensor:
    """Return a view as two views by way of the finest shape between them.

    ``[batch, heads * size]`` to ``[batch * heads, size]`` splits first and then merges.

    Raises:
        RuntimeError: there is no shape between, or DTensor has no rule for these views either.
    """
    shape = torch.empty(x.shape, device="meta").view(*sizes).shape
    strides = sorted({math.prod(of[place:]) for of in (x.shape, shape) for place in range(len(of) + 1)}, reverse=True)
    between = [outer // inner for outer, inner in pairwise(strides)]
    if between in ([*x.shape], [*shape]) or any(outer % inner for outer, inner in pairwise(strides)):
        raise RuntimeError("DTensor has no rule")
    view: DTensor = getattr(getattr(x, name)(between), name)(shape)
    return view


def calls_by_path(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """Return the calls of each module in a graph, by its path."""
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_module"):
        calls.setdefault(str(node.target), []).append(node)
    return calls


def returns_float_tensors(node: fx.Node) -> bool:
    """Return whether a node returns tensors of a dtype that can have gradients."""
    given = (part for part in pytree.tree_leaves(node.meta.get("val")) if isinstance(part, torch.Tensor))
    return any(part.is_floating_point() or part.is_complex() for part in given)


def holds_tensors(module: nn.Module) -> bool:
    """Return whether a module itself, without its children, holds parameters or buffers."""
    return any(each is not None for each in (*module._parameters.values(), *module._buffers.values()))


def returns_several_tensors(node: fx.Node) -> bool:
    """Return whether a node returns several tensors, as a split does."""
    taken = (user.meta.get("val") for user in node.users if user.target is operator.getitem and user.args[0] is node)
    return node.meta.get("val") is None and any(isinstance(value, torch.Tensor) for value in taken)
