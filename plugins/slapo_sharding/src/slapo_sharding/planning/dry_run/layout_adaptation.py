"""Operations on whole and sharded values together: whole values are cut, and partial results are reduced."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils import _pytree as pytree

from slapo_tracing.nodes import autocast_state, function_name

from ...communication._torch_private import StridedShard
from ...syncs.sharded_norms import norm_in, norm_of, variance_in
from .layout_records import LayoutRecords
from .node_values import as_meta, has_gradient, parameters_of, returns_several_tensors
from .size_arguments import leaves, with_leaves

_MAX_CHOICES = 256
_SUMS = ("sum", "mean")
_HALF_PRECISION = (torch.bfloat16, torch.float16)


def in_full_precision(values: Any) -> Any:
    """Return the values with half-precision tensors in float32 if autocast is on, as autocast does not cast meta tensors."""
    if not autocast_state():
        return values
    return pytree.tree_map_only(torch.Tensor, lambda value: value.float() if value.dtype in _HALF_PRECISION else value, values)


def run_on_cut_values(layouts: LayoutRecords, n: fx.Node, args: Any, kwargs: Any) -> Any:
    """Run a node on whole tensors cut along dimensions of the sharded sizes; raise ``ValueError`` if no choice fits."""
    given, nodes = leaves((args, kwargs)), leaves((n.args, n.kwargs))
    is_fused = bool(layouts.blocks_of(n))
    meets_activations = any(
        other in layouts.sources.keys() - layouts.replicated_parts - layouts.weights for other in n.all_input_nodes
    )
    allowed = partial(may_cut, layouts) if meets_activations and not is_fused else parameters_of
    is_cut = [isinstance(node, fx.Node) and bool(allowed(node)) for node in nodes]
    shards = [each for each in given if isinstance(each, DTensor)]
    sizes = {each.shape[part.dim] for each in shards for part in each.placements if isinstance(part, Shard | StridedShard)}
    tensors = ((place, each) for place, each in enumerate(given) if isinstance(each, torch.Tensor))
    whole = {place: each for place, each in tensors if not isinstance(each, DTensor)}
    options = [
        [(place, None), *((place, dim) for dim, size in enumerate(each.shape) if size in sizes and is_cut[place])]
        for place, each in whole.items()
    ]
    blocks = _blocks(shards)
    for chosen in islice(product(*options), 1, _MAX_CHOICES):
        cut = {place: dim for place, dim in chosen if dim is not None}
        parts = {place: _shard_of(layouts, whole[place], dim, blocks) for place, dim in cut.items()}
        args, kwargs = with_leaves((args, kwargs), parts)
        try:
            value = getattr(layouts, n.op)(n.target, args, kwargs)
        except RuntimeError:
            args, kwargs = with_leaves((args, kwargs), whole)
        else:
            layouts.cut_arguments[n] = cut
            if blocks:
                layouts.cut_blocks[n] = blocks
            return value
    if layouts.cuts_only:
        raise ValueError("the operation needs all of a value that is sharded")
    # a whole argument that DTensor accepts as a partial value beside others counts once in the sum, on the first rank
    for place, each in whole.items():
        part = DTensor.from_local(each, layouts.mesh, [Partial()], run_check=False)
        with suppress(RuntimeError):
            args, kwargs = with_leaves((args, kwargs), {**whole, place: part})
            value = getattr(layouts, n.op)(n.target, args, kwargs)
            if isinstance(value, DTensor) and value.placements[0].is_partial("sum"):
                layouts.first_rank_values[n] = place
                return value
    return _run_with_reduced_statistics(layouts, n, args, kwargs)


def _blocks(shards: list[DTensor]) -> tuple[int, ...]:
    """Return the block sizes of a strided shard, as of heads folded into the batch; empty for a plain shard."""
    for each in shards:
        (placement,) = each.placements
        if isinstance(placement, StridedShard):
            number = placement.split_factor
            return (each.shape[placement.dim] // number,) * number
    return ()


def _shard_of(layouts: LayoutRecords, whole: torch.Tensor, dim: int, blocks: tuple[int, ...]) -> DTensor:
    if sum(blocks) != whole.shape[dim] or any(block % layouts.mesh.size() for block in blocks):
        return layouts.shard(whole, dim)
    local = torch.empty_like(whole.chunk(layouts.mesh.size(), dim)[0])
    placement = StridedShard(dim, split_factor=len(blocks))
    return DTensor.from_local(local, layouts.mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())


def _run_with_reduced_statistics(layouts: LayoutRecords, n: fx.Node, args: Any, kwargs: Any) -> Any:
    """Run a norm or a variance over the sharded dimension alone; raise ``ValueError`` for any other node."""
    x = args[0] if args else None
    if isinstance(x, DTensor) and _has_statistics(layouts, n):
        (placement,) = x.placements
        if variance_in(n) is not None:
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            along = dim if isinstance(dim, int) else dim[0]
            if placement == Shard(along % x.dim()):
                layouts.norms.add(n)
                return DTensor.from_local(as_meta(n.meta["val"]), layouts.mesh, [Partial()], run_check=False)
        elif placement == Shard(x.dim() - 1):
            layouts.norms.add(n)
            values, nodes = leaves((args, kwargs)), leaves((n.args, n.kwargs))
            tensors = [place for place, each in enumerate(values) if isinstance(each, torch.Tensor)]
            places = [place for place in tensors if nodes[place] is not n.args[0]]
            if n.op == "call_function" and places:
                layouts.cut_arguments[n] = dict.fromkeys(places, 0)
            local = torch.empty_like(x.to_local(), dtype=n.meta["val"].dtype)
            return DTensor.from_local(local, layouts.mesh, [placement], run_check=False)
    raise ValueError("the operation needs all of a value that is sharded")


def _has_statistics(layouts: LayoutRecords, n: fx.Node) -> bool:
    if n.op == "call_module":
        return norm_of(layouts.fetch_attr(str(n.target))) is not None
    return norm_in(n) is not None or variance_in(n) is not None


def needs_statistics(layouts: LayoutRecords, n: fx.Node) -> bool:
    """Return whether a node is a norm, a sum, a mean or a variance."""
    return function_name(n) in _SUMS or _has_statistics(layouts, n)


def may_cut(layouts: LayoutRecords, node: fx.Node, of_layers: bool = True) -> bool:
    """Return whether a whole value may be cut: a parameter, a constant, a repeated value, or one that only reductions lead to.

    With ``of_layers``, the reduced outputs of row-parallel layers count as reductions.
    """
    is_given = layouts.cuts_inputs and _derives_from_argument(node)
    if is_given or not has_gradient(node) or parameters_of(node) or node in layouts.replicated_parts:
        return True
    if not layouts.cuts_only and _is_repeated(node):
        return True
    return not layouts.cuts_only and _derives_from_reductions(layouts, node, of_layers)


def _is_repeated(node: fx.Node) -> bool:
    """Return whether a node repeats one value for all heads, such as a rotated key. The gradient is reduced before that."""
    value = node.meta.get("val")
    return function_name(node) == "expand" and isinstance(value, torch.Tensor) and 0 in value.stride()


def _derives_from_argument(node: fx.Node) -> bool:
    """Return whether a value is a graph input, or computed from a single one."""
    while node.op in ("call_function", "call_method") and len(given := [*filter(has_gradient, node.all_input_nodes)]) == 1:
        (node,) = given
    return node.op == "placeholder"


def _derives_from_reductions(layouts: LayoutRecords, node: fx.Node, of_layers: bool) -> bool:
    """Return whether all inputs of a value with gradients are reduced values, shared layers or parameters."""
    if node in layouts.reductions or node in layouts.norms or str(node.target) in layouts.shared:
        return True
    split = layouts.splits.get(str(node.target)) if node.op == "call_module" else None
    if of_layers and split is not None and split.output == "reduced":
        return True
    path = str(node.target)
    is_call = node.op == "call_module"
    if node.op in ("placeholder", "get_attr") or (
        is_call and (path in layouts.opaque or layouts.is_layer(layouts.fetch_attr(path)))
    ):
        return False
    if any(other.op == "get_attr" and str(other.target) in layouts.shared for other in node.all_input_nodes):
        return True
    tuples = [other for other in node.all_input_nodes if other.op.startswith("call") and returns_several_tensors(other)]
    found = [*tuples, *(other for other in node.all_input_nodes if has_gradient(other) and not parameters_of(other))]
    return bool(found) and all(_derives_from_reductions(layouts, other, of_layers) for other in found)


def cut_dim(layouts: LayoutRecords, node: fx.Node, other: fx.Node) -> int | None:
    """Return the dimension along which an argument of a node is cut; None if it is used whole or cut by blocks."""
    if layouts.blocks_of(node) or node in layouts.cut_blocks:
        return None
    values = leaves((node.args, node.kwargs))
    found = {dim for place, dim in layouts.cut_arguments.get(node, {}).items() if values[place] is other}
    return found.pop() if len(found) == 1 else None


def may_reduce(layouts: LayoutRecords, n: fx.Node) -> bool:
    """Return whether a partial result may be reduced: of a product with parameters, or a sum or mean of one value."""
    return needs_statistics(layouts, n) or any(other in layouts.weights or parameters_of(other) for other in n.all_input_nodes)
