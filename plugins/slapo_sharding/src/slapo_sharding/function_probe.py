"""Numeric probe of autograd functions that people write: their backward on parts has to give parts of what it gives for all.

The dry run sees their forward alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from .node_values import has_gradient

_MOST_NUMBERS = 2**24
_TOLERANCE = 1e-3


def check_backward(node: fx.Node, args: Any, kwargs: Any, result: Any) -> None:
    """Compare forward and backward on random parts with those on all, if a call is one of an autograd function.

    Args:
        node: The call; its values say what has a gradient.
        args: Positional arguments, sharded ones as DTensors.
        kwargs: Keyword arguments.
        result: The result of the dry run.

    Raises:
        ValueError: they differ, or the function does not run here.
    """
    function = getattr(node.target, "__self__", None)
    if not isinstance(function, type) or not issubclass(function, torch.autograd.Function):
        return
    given, spec = pytree.tree_flatten((args, kwargs))
    nodes = pytree.tree_leaves((node.args, node.kwargs))
    key = tuple(
        (*_layout(each), each.dtype, has_gradient(other)) if isinstance(each, torch.Tensor) else each
        for each, other in zip(given, nodes, strict=True)
    )
    mesh = next(each.device_mesh for each in given if isinstance(each, DTensor))
    try:
        follows = _follows(node.target, spec, key, tuple(map(_layout, _tensors(result))), mesh.size())
    except TypeError:  # an argument that cannot be a key
        follows = False
    if not follows:
        raise ValueError(f"the backward of {function.__name__} on a part is not shown to be a part of that on all")


def _layout(tensor: Any) -> tuple[tuple[int, ...], int | None]:
    """Return the whole shape of a tensor, and the dimension that is sharded."""
    placement = tensor.placements[0] if isinstance(tensor, DTensor) else None
    return tuple(tensor.shape), placement.dim if isinstance(placement, Shard) else None


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


@cache
def _follows(target: Any, spec: Any, given: tuple[Any, ...], results: tuple[Any, ...], ranks: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.enable_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            whole = [_drawn(each, generator) if isinstance(each, tuple) and len(each) == 4 else each for each in given]
            dims = [each[1] if isinstance(each, tuple) and len(each) == 4 else None for each in given]
            outputs = [_drawn((*each, torch.float32, False), generator) for each in results]
            expected = _run(target, spec, whole, outputs)
            totals = [torch.zeros_like(each) if each is not None else None for each in expected[1]]
            for rank in range(ranks):
                parts = [_part(each, dim, rank, ranks) for each, dim in zip(whole, dims, strict=True)]
                grads = [_part(each, dim, rank, ranks) for each, (_, dim) in zip(outputs, results, strict=True)]
                found = _run(target, spec, parts, grads)
                for one, other, (_, dim) in zip(found[0], expected[0], results, strict=True):
                    if _differs(one, _part(other, dim, rank, ranks)):
                        return False
                for place, (one, other) in enumerate(zip(found[1], expected[1], strict=True)):
                    if other is None or one is None:
                        if (one is None) != (other is None):
                            return False
                    elif dims[place] is None:
                        totals[place] += one
                    elif _differs(one, _part(other, dims[place], rank, ranks)):
                        return False
            return not any(
                total is not None and dim is None and _differs(total, other)
                for total, other, dim in zip(totals, expected[1], dims, strict=True)
            )
    except Exception:  # whatever a stranger's function does on random numbers, or without its GPU
        return False


def _run(target: Any, spec: Any, given: Sequence[Any], outputs: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """Return the results of a call, and the gradients of its arguments."""
    leaves = [each.detach().requires_grad_(each.requires_grad) if isinstance(each, torch.Tensor) else each for each in given]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    results = _tensors(target(*args, **kwargs))
    pairs = [(one, grad) for one, grad in zip(results, outputs, strict=True) if one.requires_grad]
    torch.autograd.backward([one for one, _ in pairs], [grad.to(one.dtype) for one, grad in pairs])
    return [each.detach() for each in results], [each.grad if isinstance(each, torch.Tensor) else None for each in leaves]


def _drawn(layout: tuple[Any, ...], generator: torch.Generator) -> torch.Tensor:
    shape, _, dtype, has_gradient = layout
    if torch.Size(shape).numel() > _MOST_NUMBERS:
        raise ValueError("too large for a probe")
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(has_gradient)


def _part(value: Any, dim: int | None, rank: int, ranks: int) -> Any:
    if dim is None or not isinstance(value, torch.Tensor):
        return value
    return value.detach().chunk(ranks, dim)[rank].clone().requires_grad_(value.requires_grad)


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return True
    one, other = one.double(), other.double()
    return not bool(((one - other).abs() <= _TOLERANCE * other.abs().max().clamp(min=1e-6)).all())
