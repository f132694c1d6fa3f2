"""Outputs of fused projections in a dry run, and the parts that a model takes out of them."""

from __future__ import annotations

import math
import operator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor, Shard
from torch.fx.node import map_arg
from torch.nn import functional as F

from slapo_tracing.nodes import function_name

from .layout_records import LayoutRecords
from .node_values import as_meta, holds_tensors
from .size_arguments import is_size, leaves, local_size, record_divided_arguments
from .split_specs import ADDS, SPLITS, VIEWS, adds_same_shapes, index_bounds, index_items, keeps_shape, permutes_dims

_NOT_SEPARATED = "the parts of a fused output are not taken out one by one"


class FusedOutput:
    """Output of a fused layer before its parts are taken out. No DTensor layout describes its sharding.

    Args:
        whole: Output of all ranks together, as a meta tensor.
        sizes: Sizes of the parts.
        dim: Dimension that the parts lie along, from 0.
        replicated: Indices of the parts that every rank holds whole.
    """

    def __init__(self, whole: torch.Tensor, sizes: tuple[int, ...], dim: int, replicated: tuple[int, ...] = ()) -> None:
        self.whole, self.sizes, self.dim, self.replicated = whole, sizes, dim, replicated
        self.starts = [0, *accumulate(sizes)]

    def local_value(self, ranks: int) -> torch.Tensor:
        """Return this value on one rank; raise ``ValueError`` for a part whose size the ranks do not divide."""
        divided = [size for place, size in enumerate(self.sizes) if place not in self.replicated]
        if bad := [size for size in divided if size % ranks]:
            raise ValueError(f"size {bad[0]} is not divisible by {ranks} ranks")
        width = local_size(sum(self.sizes), ranks, self.replicated_size(0, len(self.sizes)))
        return self.whole.new_empty([*self.whole.shape[: self.dim], width, *self.whole.shape[self.dim + 1 :]])

    def replicated_size(self, first: int, last: int) -> int:
        """Return the total size of the replicated parts with indices from ``first`` to ``last - 1``."""
        return sum(size for place, size in enumerate(self.sizes[:last]) if place >= first and place in self.replicated)

    def slice_layout(self, value: torch.Tensor, bounds: tuple[int, int], layouts: LayoutRecords) -> Any:
        """Return the layout of a slice with these bounds along the parts: replicated, sharded, or fused again.

        Raises:
            ValueError: a bound lies inside a part, or replicated parts are taken out with sharded ones.
        """
        if not {*bounds} <= {*self.starts}:
            raise ValueError(_NOT_SEPARATED)
        first, last = map(self.starts.index, bounds)
        if replicated := self.replicated_size(first, last):
            if replicated < bounds[1] - bounds[0]:
                raise ValueError("parts of a fused output that every rank holds whole are taken out with others")
            return value
        sizes = self.sizes[first:last]
        return layouts.shard(value, self.dim) if len(sizes) == 1 else FusedOutput(value, sizes, self.dim)


def propagate_fused(layouts: LayoutRecords, n: fx.Node, fused: FusedOutput, args: Any, kwargs: Any) -> Any:
    """Return the result of a node on a fused output: fused alike, some of its parts, or a number; else raise ``ValueError``."""
    if _adds_bias(layouts, n, fused) or _adds_same_parts(n, fused, args):
        return FusedOutput(as_meta(n.meta["val"]), fused.sizes, fused.dim)
    kept = _elementwise_output(layouts, n, fused)
    return _take_part(layouts, n, fused, args, kwargs) if kept is None else kept


def _elementwise_output(layouts: LayoutRecords, n: fx.Node, fused: FusedOutput) -> FusedOutput | None:
    """Return the fused output of a node that treats all elements along the parts' dimension alike; None for another node.

    Activations do, and so do permutations of dimensions.
    """
    (given,) = n.all_input_nodes if len(n.all_input_nodes) == 1 else (n,)
    if given is n or not (permutes_dims(n) or keeps_shape(n, given)):
        return None
    if n.op == "call_module" and holds_tensors(layouts.fetch_attr(str(n.target))):
        return None
    local = fused.local_value(layouts.mesh.size())
    sharded = DTensor.from_local(local, layouts.mesh, [Shard(fused.dim)], run_check=False)
    args, kwargs = map_arg((n.args, n.kwargs), lambda _: sharded)
    try:
        value = layouts.call_on_meta(n, args, kwargs) if n.op == "call_module" else layouts.call_node(n, args, kwargs)
    except (RuntimeError, ValueError):
        return None
    if not isinstance(value, DTensor) or not isinstance(value.placements[0], Shard):
        return None
    dim = value.placements[0].dim
    is_kept = value.shape[dim] == sharded.shape[fused.dim] and (permutes_dims(n) or dim == fused.dim)
    return FusedOutput(as_meta(n.meta["val"]), fused.sizes, dim, fused.replicated) if is_kept else None


def _adds_bias(layouts: LayoutRecords, n: fx.Node, fused: FusedOutput) -> bool:
    """Return whether a node adds a parameter of the same parts to a fused output."""
    others = [other for other in n.all_input_nodes if other in layouts.blocks]
    if not others or fused.replicated or function_name(n) not in ADDS:
        return False
    return all(layouts.blocks[other] == fused.sizes for other in others) and n.meta["val"].shape == fused.whole.shape


def _adds_same_parts(n: fx.Node, fused: FusedOutput, args: Any) -> bool:
    """Return whether a node adds fused outputs of the same parts."""
    added = [each for each in args if isinstance(each, FusedOutput)]
    alike = all((each.sizes, each.dim, each.replicated) == (fused.sizes, fused.dim, ()) for each in added)
    return adds_same_shapes(n) and alike and len(added) == len(n.all_input_nodes)


def _take_part(layouts: LayoutRecords, n: fx.Node, fused: FusedOutput, args: Any, kwargs: Any) -> Any:
    """Return the parts that a node takes out of a fused output: by a split or chunk, a slice, or a dimension of a view.

    Parts that every rank holds whole are plain tensors.

    Raises:
        ValueError: the node does not take parts out one by one.
    """
    if not args or args[0] is not fused:
        raise ValueError("the parts of a fused output are used together")
    name, whole, dim = function_name(n), fused.whole, fused.dim
    module = layouts.fetch_attr(str(n.target)) if n.op == "call_module" else None
    if name == "size":
        return whole.size(*args[1:], **kwargs)
    if isinstance(module, nn.GLU):
        return _glu_layout(layouts, fused, F.glu(whole, module.dim))
    if name == "glu":
        return _glu_layout(layouts, fused, F.glu(whole, *args[1:], **kwargs))
    if name in SPLITS:
        return _split(layouts, n, fused, args, kwargs)
    if name in VIEWS:
        value = getattr(whole, name)(*args[1:], **kwargs)
        fused = _with_dims_before(fused, value)
        whole, dim = fused.whole, fused.dim
        if value.dim() == whole.dim() + 1 and value.shape[:dim] == whole.shape[:dim]:
            return _view_layout(layouts, n, fused, value, (args, kwargs))
        if not fused.replicated and value.dim() > whole.dim() and value.shape[dim] == len(fused.sizes):
            return _parts_as_dim(layouts, n, fused, value, (args, kwargs))
    if n.target is operator.getitem and (bounds := index_bounds(args[1], whole, dim)) is not None:
        value = fused.slice_layout(whole[args[1]], bounds, layouts)
        _record_divided(layouts, n, (args, kwargs), _replicated_beside_bounds(fused, args[1]))
        return value
    raise ValueError(_NOT_SEPARATED)


def _with_dims_before(fused: FusedOutput, value: torch.Tensor) -> FusedOutput:
    """Return a fused output with the dimensions before its parts as in a view, such as images as sequences."""
    before, number = fused.whole.shape[: fused.dim], math.prod(fused.whole.shape[: fused.dim])
    found = (place for place, size in enumerate(value.shape) if size > 1 and math.prod(value.shape[:place]) == number)
    if value.shape[: fused.dim] == before or (dim := next(found, None)) is None:
        return fused
    whole = fused.whole.reshape(*value.shape[:dim], *fused.whole.shape[fused.dim :])
    return FusedOutput(whole, fused.sizes, dim, fused.replicated)


def _glu_layout(layouts: LayoutRecords, fused: FusedOutput, value: torch.Tensor) -> DTensor:
    if fused.replicated or len(fused.sizes) != 2 or not value.shape[fused.dim] == fused.sizes[0] == fused.sizes[1]:
        raise ValueError(_NOT_SEPARATED)
    return layouts.shard(value, fused.dim)


def _split(layouts: LayoutRecords, n: fx.Node, fused: FusedOutput, args: Any, kwargs: Any) -> list[Any]:
    name = function_name(n)
    parts = getattr(fused.whole, name)(*args[1:], **kwargs)
    bounds = [*pairwise([0, *accumulate(part.shape[fused.dim] for part in parts)])]
    value = [fused.slice_layout(part, each, layouts) for part, each in zip(parts, bounds, strict=True)]
    divided = {high - low for (low, high), part in zip(bounds, value, strict=True) if isinstance(part, DTensor | FusedOutput)}
    if name != "chunk":
        ranks = layouts.mesh.size()
        layouts.sizes_to_divide[n] = tuple(divided)
        shapes = [_local_value(part, ranks).shape for part in value]
        record_divided_arguments(layouts, n, ((fused.local_value(ranks), *args[1:]), kwargs), shapes)
    elif fused.replicated:
        raise ValueError(_NOT_SEPARATED)
    return value


def _local_value(value: Any, ranks: int) -> torch.Tensor:
    if isinstance(value, FusedOutput):
        return value.local_value(ranks)
    return value.to_local() if isinstance(value, DTensor) else value


def _parts_as_dim(layouts: LayoutRecords, n: fx.Node, fused: FusedOutput, value: torch.Tensor, given: Any) -> DTensor:
    """Return a view with the parts as a dimension; each part is split along the next dimension."""
    place = _size_index(n, fused.dim) + 1
    size = leaves(given)[place] if place < len(leaves(given)) else -1
    _record_divided(layouts, n, given, {place: 0} if size != -1 else {})
    return layouts.shard(value, fused.dim + 1)


def _view_layout(layouts: LayoutRecords, n: fx.Node, fused: FusedOutput, value: torch.Tensor, given: Any) -> Any:
    """Return a view with the parts, or the heads in them, as a dimension."""
    number, width = value.shape[fused.dim : fused.dim + 2]
    if {*fused.sizes} == {width} and not fused.replicated:
        return _parts_as_dim(layouts, n, fused, value, given)
    if any(size % width for size in fused.sizes) or number * width != sum(fused.sizes):
        raise ValueError(_NOT_SEPARATED)
    heads = FusedOutput(value, tuple(size // width for size in fused.sizes), fused.dim, fused.replicated)
    place = _size_index(n, fused.dim)
    replicated = heads.replicated_size(0, len(heads.sizes))
    _record_divided(layouts, n, given, {place: replicated} if leaves(given)[place] != -1 else {})
    return heads


def _size_index(n: fx.Node, dim: int) -> int:
    """Return the leaf index of the size that a view has along a dimension."""
    return 2 if function_name(n) == "unflatten" else 1 + dim


def _replicated_beside_bounds(fused: FusedOutput, index: Any) -> dict[int, int]:
    """Return the leaf indices of the slice bounds along the parts, to the replicated size before each bound.

    For a bound that counts from the end, it is the replicated size behind the bound.
    """
    items = index_items(index, fused.whole.dim())
    assert items is not None
    written = list(index) if isinstance(index, tuple) else [index]
    at = fused.dim if fused.dim < len(written) and Ellipsis not in written[: fused.dim + 1] else fused.dim - fused.whole.dim()
    item = written[at]
    offset = 1 + len(leaves(written[:at] if at >= 0 else written[: len(written) + at]))
    return {offset + place: _replicated_size_beside(fused, bound) for place, bound in enumerate(leaves(item)) if is_size(bound)}


def _replicated_size_beside(fused: FusedOutput, bound: int) -> int:
    number, size = len(fused.sizes), fused.starts[-1]
    place = fused.starts.index(min(bound, size) if bound >= 0 else bound + size)
    return fused.replicated_size(0, place) if bound >= 0 else fused.replicated_size(place, number)


def _record_divided(layouts: LayoutRecords, n: fx.Node, given: Any, replicated: dict[int, int]) -> None:
    """Record the leaf indices of arguments that differ on one rank, with the replicated size in each."""
    values, ranks = leaves(given), layouts.mesh.size()
    changed = {place: each for place, each in replicated.items() if local_size(values[place], ranks, each) != values[place]}
    layouts.sizes_to_divide[n] = tuple(dict.fromkeys(values[place] for place in changed))
    layouts.divided_arguments[n] = changed
    local = {place: local_size(values[place], ranks, each) for place, each in changed.items()}
    layouts.local_arguments[n] = [local.get(place, each) for place, each in enumerate(values)]
