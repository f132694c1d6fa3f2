"""Values of the nodes of a graph: their tensors without data, and the parameters that they are made from."""

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
    """Object that is not known, as the result of a call that cannot be run without data; tensors taken out of it are."""

    def __getattr__(self, name: str) -> UnknownObject:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, index: Any) -> UnknownObject:
        return self


def as_meta(value: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape without data."""
    if value.is_meta and type(value) is torch.Tensor:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def has_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.requires_grad


def has_any_gradient(node: fx.Node) -> bool:
    """Return whether a value has a gradient, or one of several, as those of a split."""
    return has_gradient(node) or any(
        user.target is operator.getitem and user.args[0] is node and has_gradient(user) for user in node.users
    )


def parameters_of(node: fx.Node) -> list[str]:
    """Names of the parameters a value is made from, if it is made from nothing else that has a gradient; else empty."""
    if node.op == "get_attr":
        return [str(node.target)]
    if node.op in ("placeholder", "call_module"):
        return []
    found = [parameters_of(other) for other in node.all_input_nodes if has_any_gradient(other)]
    return [name for names in found for name in names] if all(found) else []


def run_by_heads(name: str, args: Any, kwargs: Any) -> DTensor | torch.Tensor:
    """Return the result of a product or an attention for which DTensor has no rule, though ranks need no more than they have.

    Products of matrices in batches that are repeated have one as an einsum; of an attention, one whole head of keys and values
    may serve all query heads of a rank. A view that splits one dimension and merges the next is two views.

    Raises:
        RuntimeError: it is none of these.
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
    """Return a view by way of the finest shape between: ``[batch, heads * size]`` to ``[batch * heads, size]`` splits first.

    Raises:
        RuntimeError: there is none, or DTensor has no rule for these either.
    """
    shape = torch.empty(x.shape, device="meta").view(*sizes).shape
    strides = sorted({math.prod(of[place:]) for of in (x.shape, shape) for place in range(len(of) + 1)}, reverse=True)
    between = [outer // inner for outer, inner in pairwise(strides)]
    if between in ([*x.shape], [*shape]) or any(outer % inner for outer, inner in pairwise(strides)):
        raise RuntimeError("DTensor has no rule")
    view: DTensor = getattr(getattr(x, name)(between), name)(shape)
    return view


def returns_float_tensors(node: fx.Node) -> bool:
    """Return whether a node gives tensors that may have gradients."""
    given = (part for part in pytree.tree_leaves(node.meta.get("val")) if isinstance(part, torch.Tensor))
    return any(part.is_floating_point() or part.is_complex() for part in given)


def holds_tensors(module: nn.Module) -> bool:
    """Return whether a module holds parameters or buffers itself."""
    return any(each is not None for each in (*module._parameters.values(), *module._buffers.values()))


def returns_several_tensors(node: fx.Node) -> bool:
    """Return whether a node gives several tensors, as a split does."""
    taken = (user.meta.get("val") for user in node.users if user.target is operator.getitem and user.args[0] is node)
    return node.meta.get("val") is None and any(isinstance(value, torch.Tensor) for value in taken)
