"""Numeric probe of functions on sharded values that DTensor has no rule for.

These are a model's own autograd functions and some operators. In a dry run, only the forward of an autograd function is seen,
with the sizes of all ranks together. The probe runs the function on random numbers, whole and on each shard. Each shard of the
arguments and of the output gradient must give that shard of the results and of the input gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from ...communication._torch_autograd import no_functions
from ...communication._torch_private import no_modes

MIXES = "the operation needs all of a value that is sharded, or of its gradient"


def is_autograd_function(target: Any) -> bool:
    """Return whether a call target is the ``apply`` of an autograd function."""
    owner = getattr(target, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def check_on_random_shards(target: Any, args: Any, kwargs: Any, results: Any, ranks: int) -> None:
    """Compare a function on whole random tensors with the function on their shards, forward and backward.

    Sharded arguments, and sharded results of the dry run, are DTensors. Raises ``ValueError`` if results or gradients of the
    shards differ from those of the whole, or if the function fails.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    dims = [_dim(leaf) for leaf in leaves]
    generator = torch.Generator().manual_seed(0)
    whole = [random_tensor(leaf.shape, leaf.dtype, generator) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    outputs = [_dim(each) for each in pytree.tree_leaves(results) if isinstance(each, torch.Tensor)]
    try:
        expected, gradients, wanted = _forward_backward(target, whole, spec, None, generator)
        chunks = [(_chunks(whole, dims, rank, ranks), _chunks(wanted, outputs, rank, ranks)) for rank in range(ranks)]
        found = [_forward_backward(target, own, spec, grads, generator)[:2] for own, grads in chunks]
    except Exception as err:  # user code may raise anything
        raise ValueError(f"{MIXES}: it fails on random numbers") from err
    for number, value in enumerate(expected):
        if not all(_is_close(_chunk(value, outputs[number], rank, ranks), each[0][number]) for rank, each in enumerate(found)):
            raise ValueError(MIXES)
    for number, gradient in enumerate(gradients):
        own = [each[1][number] for each in found]
        # the gradient of a replicated argument is partial on each rank, so the sum is compared
        summed = own if dims[number] is not None else [sum(each for each in own if each is not None)] * ranks
        if gradient is None and any(each is not None for each in own):
            raise ValueError(MIXES)
        parts = [_chunk(gradient, dims[number], rank, ranks) for rank in range(ranks)]
        if gradient is not None and not all(map(_is_close, parts, summed)):
            raise ValueError(MIXES)


def probe_operator(node: fx.Node, args: Any, kwargs: Any, mesh: DeviceMesh) -> DTensor:
    """Compute an operator without a DTensor rule where each rank's result follows from its own shards.

    Reflection padding, windows of a sequence and pairwise distances are such operators.

    Raises:
        RuntimeError: the result needs other ranks' data, or the operator is random, writes in place or returns several tensors.
    """
    target: Any = node.target
    run = target if node.op == "call_function" else lambda x, *others, **named: getattr(x, target)(*others, **named)
    dims = {_dim(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)}
    own, named = pytree.tree_map_only(DTensor, DTensor.to_local, (args, kwargs))
    local = run(*own, **named)
    if None in dims or node.meta.get("mutates") or node.meta.get("draws") or not isinstance(local, torch.Tensor):
        raise RuntimeError("DTensor has no rule")
    whole = node.meta["val"].shape
    for dim in (dim for dim, size in enumerate(whole) if size == local.shape[dim] * mesh.size()):
        result = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
        with suppress(ValueError):
            check_on_random_shards(run, args, kwargs, result, mesh.size())
            return result
    raise RuntimeError("DTensor has no rule")


def _dim(leaf: Any) -> int | None:
    if not isinstance(leaf, DTensor):
        return None
    placement = leaf.placements[0]
    return placement.dim if isinstance(placement, Shard) else None


def is_continuous(dtype: torch.dtype) -> bool:
    """Return whether a dtype is floating-point or complex."""
    return dtype.is_floating_point or dtype.is_complex


def random_tensor(shape: Iterable[int], dtype: torch.dtype, generator: torch.Generator, share: float = 0.5) -> torch.Tensor:
    """Return normal values, or zeros with a fraction of ones, which are valid indices nearly everywhere."""
    if not is_continuous(dtype):
        return (torch.rand(tuple(shape), generator=generator, device="cpu") < share).to(dtype)
    kind = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(tuple(shape), dtype=kind, generator=generator, device="cpu").to(dtype)


def _chunk(value: Any, dim: int | None, rank: int, ranks: int) -> Any:
    return value if dim is None or value is None else value.chunk(ranks, dim)[rank].contiguous()


def _chunks(values: Sequence[Any], dims: Sequence[int | None], rank: int, ranks: int) -> list[Any]:
    return [_chunk(value, dim, rank, ranks) for value, dim in zip(values, dims, strict=True)]


def _forward_backward(
    target: Any, leaves: Sequence[Any], spec: Any, wanted: Sequence[Any] | None, generator: torch.Generator
) -> Any:
    """Return the results, the gradient of each argument or None, and the output gradients that the backward started from."""
    given = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    with torch.enable_grad(), no_functions(), no_modes(), torch.device("cpu"):
        for leaf in given:
            if isinstance(leaf, torch.Tensor) and is_continuous(leaf.dtype):
                leaf.requires_grad_()
        tracked = [leaf.view_as(leaf) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf for leaf in given]
        args, kwargs = pytree.tree_unflatten(tracked, spec)
        results = [each for each in pytree.tree_leaves(target(*args, **kwargs)) if isinstance(each, torch.Tensor)]
        if wanted is None:
            wanted = [random_tensor(each.shape, each.dtype, generator) if each.requires_grad else None for each in results]
        sources = {place: leaf for place, leaf in enumerate(given) if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
        ends = [(each, grad) for each, grad in zip(results, wanted, strict=True) if grad is not None and each.requires_grad]
        found: Any = [None] * len(sources)
        if ends and sources:
            outputs, grads = zip(*ends, strict=True)
            found = torch.autograd.grad(outputs, [*sources.values()], grads, allow_unused=True)
    of = dict(zip(sources, found, strict=True))
    return [each.detach() for each in results], [of.get(place) for place in range(len(given))], wanted


def _is_close(expected: torch.Tensor, found: Any) -> bool:
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        return False
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64, torch.complex64) else 2e-2
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(found.to(expected.dtype), expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
