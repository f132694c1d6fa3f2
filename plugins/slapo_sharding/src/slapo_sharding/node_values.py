"""Values of the nodes of a graph: their tensors without data, and the parameters that they are made from."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree


def as_meta(value: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape without data."""
    if value.is_meta and type(value) is torch.Tensor:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def has_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.requires_grad


def parameters_of(node: fx.Node) -> list[str]:
    """Names of the parameters a value is made from, if it is made from nothing else that has a gradient; else empty."""
    if node.op == "get_attr":
        return [str(node.target)]
    if node.op in ("placeholder", "call_module"):
        return []
    found = [parameters_of(other) for other in node.all_input_nodes if has_gradient(other)]
    return [name for names in found for name in names] if all(found) else []


def batched_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return a product of matrices in batches that are repeated, for which DTensor has rules where it is an einsum."""
    batch = "abcdefgh"[: max(x.dim(), y.dim()) - 2]
    left, right = (batch[len(batch) - each.dim() + 2 :] for each in (x, y))
    return torch.einsum(f"{left}ij,{right}jk->{batch}ik", x, y)


def gives_numbers(node: fx.Node) -> bool:
    """Return whether a node gives tensors that may have gradients."""
    given = (part for part in pytree.tree_leaves(node.meta.get("val")) if isinstance(part, torch.Tensor))
    return any(part.is_floating_point() or part.is_complex() for part in given)


def has_tensors(module: nn.Module) -> bool:
    """Return whether a module holds parameters or buffers itself."""
    return any(each is not None for each in (*module._parameters.values(), *module._buffers.values()))


def gives_tensors(node: fx.Node) -> bool:
    """Return whether a node gives several tensors, as a split does."""
    taken = (user.meta.get("val") for user in node.users if user.target is operator.getitem and user.args[0] is node)
    return node.meta.get("val") is None and any(isinstance(value, torch.Tensor) for value in taken)
