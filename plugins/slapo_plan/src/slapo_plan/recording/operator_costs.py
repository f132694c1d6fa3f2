"""Floating-point operations and bytes of one call of an operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ..records import OperatorRecord

_NO_WORK = {
    *("_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "detach", "empty", "empty_like", "empty_permuted"),
    *("empty_strided", "is_same_size", "lift", "lift_fresh", "new_empty", "new_empty_strided", "resize_", "set_"),
}
_WRITES_ONLY = {"bernoulli_", "copy_", "fill_", "normal_", "uniform_", "zero_"}
"""Operators in place that do not read the tensor they write; ``copy_`` reads its source."""
_READS_ROWS = {"embedding", "gather", "index", "index_select", "take"}
"""Operators that read as much of their first tensor as they return."""
_WRITES_ROWS = {"index_add", "index_add_", "index_put", "index_put_", "scatter_add", "scatter_add_"}
"""Operators that read and write as much of their first tensor as they are given."""
_FACTORS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_scaled_mm": (0, 1)}
"""Operators that multiply matrices: positions of the two factors."""


def operator_record(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> OperatorRecord | None:
    """Return the record of one call, or None for views, allocations and reads of a number.

    Args:
        func: Operator, e.g. ``torch.ops.aten.mm.default``.
        args: Its arguments.
        kwargs: Its keyword arguments.
        output: What it returned.
    """
    packet = func.overloadpacket
    name = packet.__name__
    inputs = list(_tensors((*args, *kwargs.values())))
    outputs = list(_tensors((output,)))
    if not outputs or func.namespace in ("profiler", "prim") or func.is_view or name in _NO_WORK:
        return None
    kind, suffix = "pointwise", ""
    shape: tuple[int, ...] = ()
    if name in _FACTORS:
        left, right = (args[position] for position in _FACTORS[name])
        kind = "matmul"
        shape = (left.shape[0] if left.dim() == 3 else 1, left.shape[-2], right.shape[-1], left.shape[-1])
    elif "attention" in name:
        kind, shape = "attention", _attention_shape(name, args)
        suffix = ".causal" if _argument(func, "is_causal", args, kwargs) else ""
    elif "convolution" in name or "conv2d" in name:
        kind = "convolution"
    computes = inputs[0] if kind != "pointwise" and inputs else outputs[0]
    dtype = next((each.dtype for each in (computes, *outputs) if each.is_floating_point()), computes.dtype)
    flops = _flops(packet, kind, shape, args, kwargs, output)
    if kind == "pointwise" and flops:  # a plugin's own operator that registered its operations
        kind = "matmul"
    return OperatorRecord(f"{func.namespace}.{name}{suffix}", kind, dtype, flops, _nbytes(func, name, inputs, outputs), shape)


def _flops(packet: Any, kind: str, shape: tuple[int, ...], args: Any, kwargs: Mapping[str, Any], output: Any) -> int:
    if kind == "attention" and shape:
        batch, heads, queries, keys, width = shape
        products = 5 if packet.__name__.endswith("backward") else 2  # the backward computes the scores again
        return products * 2 * batch * heads * queries * keys * width
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=output))


def _attention_shape(name: str, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return ``(batch, heads, queries, keys, width)`` of an operator on tensors ``[batch, heads, length, width]``."""
    query, key = args[1:3] if name.endswith("backward") else args[:2]
    if query.dim() != 4 or key.dim() != 4:
        return ()
    batch, heads, queries, width = query.shape
    return (batch, heads, queries, key.shape[-2], width)


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return an argument of a call by its name, or None."""
    places = {argument.name: (place, argument.default_value) for place, argument in enumerate(func._schema.arguments)}
    place, default = places.get(name, (len(args), None))
    return kwargs.get(name, args[place] if place < len(args) else default)


def _nbytes(func: Any, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Return the bytes read and written; a tensor given twice is read once, and a broadcast one has its own size."""
    if name in _READS_ROWS:
        return 2 * _size(outputs[0]) + sum(map(_size, inputs[1:]))
    if name in _WRITES_ROWS:
        return sum(map(_size, inputs[1:])) + 2 * _size(max(inputs[1:], key=_size))
    read = inputs[1:] if name in _WRITES_ONLY else inputs
    unique = {id(tensor): _size(tensor) for tensor in read}
    return sum(unique.values()) + sum({id(tensor): _size(tensor) for tensor in outputs}.values())


def _size(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return int(tensor.numel()) * tensor.element_size()
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return prod(sizes) * tensor.element_size()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
