"""Output of a fused projection in a dry run: the parts that a model takes out of it, and what each rank has of these."""

from __future__ import annotations

import math
import operator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor, Shard
from torch.fx.node import map_arg
from torch.nn import functional as F

from slapo_tracing.nodes import function_name

from .divided_sizes import record_divided_arguments
from .fused_sizes import ADDS, SPLITS, VIEWS, adds_same_shapes, index_bounds, index_items, keeps_shape, permutes_dims
from .node_values import as_meta, holds_tensors
from .size_arguments import is_size, leaves, local_size

if TYPE_CHECKING:
    from .layouts import Layouts

_NOT_SEPARATED = "the parts of a fused output are not taken out one by one"


class FusedOutput:
    """The output of a fused layer before its parts are taken out; no layout says how it is sharded.

    Args:
        whole: The output of all ranks together, without data.
        sizes: Sizes of the parts.
        dim: Dimension that is made of the parts, counted from 0.
        copied: Places of the parts that every rank has whole.
    """

    def __init__(self, whole: torch.Tensor, sizes: tuple[int, ...], dim: int, copied: tuple[int, ...] = ()) -> None:
        self.whole, self.sizes, self.dim, self.copied = whole, sizes, dim, copied
        self.starts = [0, *accumulate(sizes)]

    def local(self, ranks: int) -> torch.Tensor:
        """Return this value on one of the ranks.

        Raises:
            ValueError: the ranks do not divide a part.
        """
        divided = [size for place, size in enumerate(self.sizes) if place not in self.copied]
        if bad := [size for size in divided if size % ranks]:
            raise ValueError(f"size {bad[0]} is not divisible by {ranks} ranks")
        width = local_size(sum(self.sizes), ranks, self.held(0, len(self.sizes)))
        return self.whole.new_empty([*self.whole.shape[: self.dim], width, *self.whole.shape[self.dim + 1 :]])

    def held(self, first: int, last: int) -> int:
        """Return the size of those parts between two places that every rank has whole."""
        return sum(size for place, size in enumerate(self.sizes[:last]) if place >= first and place in self.copied)

    def taken(self, value: torch.Tensor, bounds: tuple[int, int], layouts: Layouts) -> Any:
        """Return what lies between two bounds, as a layout says it: whole, sharded, or made of parts again.

        Args:
            value: The same of the whole output.
            bounds: First and last place, plus one, along the dimension of the parts.
            layouts: The dry run.

        Raises:
            ValueError: a bound is inside a part, or parts that every rank has whole are taken with others.
        """
        if not {*bounds} <= {*self.starts}:
            raise ValueError(_NOT_SEPARATED)
        first, last = map(self.starts.index, bounds)
        if held := self.held(first, last):
            if held < bounds[1] - bounds[0]:
                raise ValueError("parts of a fused output that every rank has whole are taken out with others")
            return value
        sizes = self.sizes[first:last]
        return layouts._shard(value, self.dim) if len(sizes) == 1 else FusedOutput(value, sizes, self.dim)


def propagate_fused(layouts: Layouts, n: fx.Node, fused: FusedOutput, args: Any, kwargs: Any) -> Any:
    """Return what a node makes of a fused output: one of the same parts, some of these, or a number.

    Raises:
        ValueError: it neither keeps the parts nor takes them out one by one.
    """
    if _adds_bias(layouts, n, fused) or _adds_same_parts(n, fused, args):
        return FusedOutput(as_meta(n.meta["val"]), fused.sizes, fused.dim)
    kept = _elementwise_output(layouts, n, fused)
    return _take_part(layouts, n, fused, args, kwargs) if kept is None else kept


def _elementwise_output(layouts: Layouts, n: fx.Node, fused: FusedOutput) -> FusedOutput | None:
    """Return the output of a node that does the same to every number along the dimension of the parts; None for another.

    Activations do, and what puts dimensions in another order.

    Args:
        layouts: The dry run.
        n: The node.
        fused: The output that it is given.
    """
    (given,) = n.all_input_nodes if len(n.all_input_nodes) == 1 else (n,)
    if given is n or not (permutes_dims(n) or keeps_shape(n, given)):
        return None
    if n.op == "call_module" and holds_tensors(layouts.fetch_attr(str(n.target))):
        return None
    local = fused.local(layouts.mesh.size())
    sharded = DTensor.from_local(local, layouts.mesh, [Shard(fused.dim)], run_check=False)
    args, kwargs = map_arg((n.args, n.kwargs), lambda _: sharded)
    try:
        value = layouts._whole(n, args, kwargs) if n.op == "call_module" else layouts._call(n, args, kwargs)
    except (RuntimeError, ValueError):
        return None
    if not isinstance(value, DTensor) or not isinstance(value.placements[0], Shard):
        return None
    dim = value.placements[0].dim
    is_kept = value.shape[dim] == sharded.shape[fused.dim] and (permutes_dims(n) or dim == fused.dim)
    return FusedOutput(as_meta(n.meta["val"]), fused.sizes, dim, fused.copied) if is_kept else None


def _adds_bias(layouts: Layouts, n: fx.Node, fused: FusedOutput) -> bool:
    """Return whether a node adds a parameter of the same parts to a fused output."""
    others = [other for other in n.all_input_nodes if other in layouts.blocks]
    if not others or fused.copied or function_name(n) not in ADDS:
        return False
    return all(layouts.blocks[other] == fused.sizes for other in others) and n.meta["val"].shape == fused.whole.shape


def _adds_same_parts(n: fx.Node, fused: FusedOutput, args: Any) -> bool:
    """Return whether a node adds fused outputs of the same parts."""
    added = [each for each in args if isinstance(each, FusedOutput)]
    alike = all((each.sizes, each.dim, each.copied) == (fused.sizes, fused.dim, ()) for each in added)
    return adds_same_shapes(n) and alike and len(added) == len(n.all_input_nodes)


def _take_part(layouts: Layouts, n: fx.Node, fused: FusedOutput, args: Any, kwargs: Any) -> Any:
    """Return what a node takes out of a fused output: by split or chunk, as a slice, or as a dimension of a view.

    Parts that every rank has whole are no DTensors.

    Raises:
        ValueError: it does not take parts out one by one.
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
        if not fused.copied and value.dim() > whole.dim() and value.shape[dim] == len(fused.sizes):
            return _parts_as_dim(layouts, n, fused, value, (args, kwargs))
    if n.target is operator.getitem and (bounds := index_bounds(args[1], whole, dim)) is not None:
        value = fused.taken(whole[args[1]], bounds, layouts)
        _record_divided(layouts, n, (args, kwargs), _replicated_beside_bounds(fused, args[1]))
        return value
    raise ValueError(_NOT_SEPARATED)


def _with_dims_before(fused: FusedOutput, value: torch.Tensor) -> FusedOutput:
    """Return a fused output with the dimensions before its parts as a view of it has them: images, say, as sequences."""
    before, number = fused.whole.shape[: fused.dim], math.prod(fused.whole.shape[: fused.dim])
    found = (place for place, size in enumerate(value.shape) if size > 1 and math.prod(value.shape[:place]) == number)
    if value.shape[: fused.dim] == before or (dim := next(found, None)) is None:
        return fused
    whole = fused.whole.reshape(*value.shape[:dim], *fused.whole.shape[fused.dim :])
    return FusedOutput(whole, fused.sizes, dim, fused.copied)


def _glu_layout(layouts: Layouts, fused: FusedOutput, value: torch.Tensor) -> DTensor:
    if fused.copied or len(fused.sizes) != 2 or not value.shape[fused.dim] == fused.sizes[0] == fused.sizes[1]:
        raise ValueError(_NOT_SEPARATED)
    return layouts._shard(value, fused.dim)


def _split(layouts: Layouts, n: fx.Node, fused: FusedOutput, args: Any, kwargs: Any) -> list[Any]:
    name = function_name(n)
    parts = getattr(fused.whole, name)(*args[1:], **kwargs)
    bounds = [*pairwise([0, *accumulate(part.shape[fused.dim] for part in parts)])]
    value = [fused.taken(part, each, layouts) for part, each in zip(parts, bounds, strict=True)]
    divided = {high - low for (low, high), part in zip(bounds, value, strict=True) if isinstance(part, DTensor | FusedOutput)}
    if name != "chunk":
        ranks = layouts.mesh.size()
        layouts.sized[n] = tuple(divided)
        record_divided_arguments(
            layouts, n, ((fused.local(ranks), *args[1:]), kwargs), [_local_value(part, ranks).shape for part in value]
        )
    elif fused.copied:
        raise ValueError(_NOT_SEPARATED)
    return value


def _local_value(value: Any, ranks: int) -> torch.Tensor:
    if isinstance(value, FusedOutput):
        return value.local(ranks)
    return value.to_local() if isinstance(value, DTensor) else value


def _parts_as_dim(layouts: Layouts, n: fx.Node, fused: FusedOutput, value: torch.Tensor, given: Any) -> DTensor:
    """Return a view with the parts as a dimension: each is split along the next one."""
    place = _size_index(n, fused.dim) + 1
    size = leaves(given)[place] if place < len(leaves(given)) else -1
    _record_divided(layouts, n, given, {place: 0} if size != -1 else {})
    return layouts._shard(value, fused.dim + 1)


def _view_layout(layouts: Layouts, n: fx.Node, fused: FusedOutput, value: torch.Tensor, given: Any) -> Any:
    """Return a view with the parts, or their heads, as a dimension."""
    number, width = value.shape[fused.dim : fused.dim + 2]
    if {*fused.sizes} == {width} and not fused.copied:
        return _parts_as_dim(layouts, n, fused, value, given)
    if any(size % width for size in fused.sizes) or number * width != sum(fused.sizes):
        raise ValueError(_NOT_SEPARATED)
    heads = FusedOutput(value, tuple(size // width for size in fused.sizes), fused.dim, fused.copied)
    place = _size_index(n, fused.dim)
    _record_divided(layouts, n, given, {place: heads.held(0, len(heads.sizes))} if leaves(given)[place] != -1 else {})
    return heads


def _size_index(n: fx.Node, dim: int) -> int:
    """Return the place of a view's size along a dimension, among the leaves of the arguments."""
    return 2 if function_name(n) == "unflatten" else 1 + dim


def _replicated_beside_bounds(fused: FusedOutput, index: Any) -> dict[int, int]:
    """Return the places of the numbers that cut along the dimension of the parts, and what each rank has whole before them.

    Of numbers that count from the end it is what each rank has whole behind them.
    """
    items = index_items(index, fused.whole.dim())
    assert items is not None
    written = list(index) if isinstance(index, tuple) else [index]
    at = fused.dim if fused.dim < len(written) and Ellipsis not in written[: fused.dim + 1] else fused.dim - fused.whole.dim()
    item = written[at]
    offset = 1 + len(leaves(written[:at] if at >= 0 else written[: len(written) + at]))
    return {offset + place: _replicated_beside(fused, bound) for place, bound in enumerate(leaves(item)) if is_size(bound)}


def _replicated_beside(fused: FusedOutput, bound: int) -> int:
    number, size = len(fused.sizes), fused.starts[-1]
    place = fused.starts.index(min(bound, size) if bound >= 0 else bound + size)
    return fused.held(0, place) if bound >= 0 else fused.held(place, number)


def _record_divided(layouts: Layouts, n: fx.Node, given: Any, held: dict[int, int]) -> None:
    """Note the places of numbers that are others on one rank, with what each rank has whole of them."""
    values, ranks = leaves(given), layouts.mesh.size()
    changed = {place: each for place, each in held.items() if local_size(values[place], ranks, each) != values[place]}
    layouts.sized[n] = tuple(dict.fromkeys(values[place] for place in changed))
    layouts.divided[n] = changed
    layouts.expected[n] = [
        local_size(each, ranks, changed[place]) if place in changed else each for place, each in enumerate(values)
    ]
