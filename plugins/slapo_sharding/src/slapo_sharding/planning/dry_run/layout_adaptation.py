"""Operations on whole values beside sharded ones: the parts of these that they are given, and results that are added up."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils import _pytree as pytree

from slapo_tracing.nodes import autocast_state, function_name

from ...communication._torch_private import StridedShard
from ...syncs.sharded_norms import norm_in, norm_of, variance_in
from .node_values import as_meta, gives_tensors, has_gradient, parameters_of
from .size_arguments import leaves, with_leaves

if TYPE_CHECKING:
    from .layouts import Layouts

_MOST_CHOICES = 256
_SUMS = ("sum", "mean")
_HALF = (torch.bfloat16, torch.float16)


def in_full_precision(values: Any) -> Any:
    """Return values with tensors of half precision in float32 where autocast is on, which does not cast what has no data."""
    if not autocast_state():
        return values
    return pytree.tree_map_only(torch.Tensor, lambda value: value.float() if value.dtype in _HALF else value, values)


def with_parts(layouts: Layouts, n: fx.Node, args: Any, kwargs: Any) -> Any:
    """Run a node on parts of the whole tensors that are as long as what is sharded.

    Raises:
        ValueError: none of these fit.
    """
    given, nodes = leaves((args, kwargs)), leaves((n.args, n.kwargs))
    is_fused = bool(layouts.blocks_of(n))
    allowed = partial(may_cut, layouts) if _meets_activations(layouts, n) and not is_fused else parameters_of
    is_cut = [isinstance(node, fx.Node) and bool(allowed(node)) for node in nodes]
    shards = [each for each in given if isinstance(each, DTensor)]
    sizes = {each.shape[part.dim] for each in shards for part in each.placements if isinstance(part, Shard | StridedShard)}
    whole = {
        place: each for place, each in enumerate(given) if isinstance(each, torch.Tensor) and not isinstance(each, DTensor)
    }
    options = [
        [(place, None), *((place, dim) for dim, size in enumerate(each.shape) if size in sizes and is_cut[place])]
        for place, each in whole.items()
    ]
    blocks = _blocks(shards)
    for chosen in islice(product(*options), 1, _MOST_CHOICES):
        cut = {place: dim for place, dim in chosen if dim is not None}
        parts = {place: _cut(layouts, whole[place], dim, blocks) for place, dim in cut.items()}
        args, kwargs = with_leaves((args, kwargs), parts)
        try:
            value = getattr(layouts, n.op)(n.target, args, kwargs)
        except RuntimeError:
            args, kwargs = with_leaves((args, kwargs), whole)
        else:
            layouts.cut[n] = cut
            if blocks:
                layouts.cut_blocks[n] = blocks
            return value
    if layouts.cuts_only:
        raise ValueError("the operation needs all of a value that is sharded")
    for place, each in whole.items():  # what DTensor takes for a part of a sum, beside others, is added up with these
        part = DTensor.from_local(each, layouts.mesh, [Partial()], run_check=False)
        with suppress(RuntimeError):
            args, kwargs = with_leaves((args, kwargs), {**whole, place: part})
            value = getattr(layouts, n.op)(n.target, args, kwargs)
            if isinstance(value, DTensor) and value.placements[0].is_partial("sum"):
                layouts.once[n] = place
                return value
    return _with_statistics(layouts, n, args, kwargs)


def _blocks(shards: list[DTensor]) -> tuple[int, ...]:
    """Return the sizes of the blocks of each of which ranks have a part, as of heads folded into the batch; empty for one."""
    for each in shards:
        (placement,) = each.placements
        if isinstance(placement, StridedShard):
            number = placement.split_factor
            return (each.shape[placement.dim] // number,) * number
    return ()


def _cut(layouts: Layouts, whole: torch.Tensor, dim: int, blocks: tuple[int, ...]) -> DTensor:
    if sum(blocks) != whole.shape[dim] or any(block % layouts.mesh.size() for block in blocks):
        return layouts._shard(whole, dim)
    local = torch.empty_like(whole.chunk(layouts.mesh.size(), dim)[0])
    placement = StridedShard(dim, split_factor=len(blocks))
    return DTensor.from_local(local, layouts.mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())


def _with_statistics(layouts: Layouts, n: fx.Node, args: Any, kwargs: Any) -> Any:
    """Take a norm or a variance along the sharded dimension for one whose statistics are summed over the ranks.

    Raises:
        ValueError: it is none, or along other dimensions too.
    """
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
            places = [
                place for place, each in enumerate(values) if isinstance(each, torch.Tensor) and nodes[place] is not n.args[0]
            ]
            if n.op == "call_function" and places:
                layouts.cut[n] = dict.fromkeys(places, 0)
            local = torch.empty_like(x.to_local(), dtype=n.meta["val"].dtype)
            return DTensor.from_local(local, layouts.mesh, [placement], run_check=False)
    raise ValueError("the operation needs all of a value that is sharded")


def _has_statistics(layouts: Layouts, n: fx.Node) -> bool:
    if n.op == "call_module":
        return norm_of(layouts.fetch_attr(str(n.target))) is not None
    return norm_in(n) is not None or variance_in(n) is not None


def needs_statistics(layouts: Layouts, n: fx.Node) -> bool:
    """Return whether a node is a norm, or gives a sum, a mean or a variance of what it is given."""
    return function_name(n) in _SUMS or _has_statistics(layouts, n)


def _meets_activations(layouts: Layouts, n: fx.Node) -> bool:
    """Return whether a node is given sharded values that are not made from parameters alone."""
    return any(other in layouts.sources.keys() - layouts.copies - layouts.weights for other in n.all_input_nodes)


def may_cut(layouts: Layouts, node: fx.Node, of_layers: bool = True) -> bool:
    """Return whether ranks may cut a whole value: a parameter, a constant, or one that is there for their parts.

    Args:
        layouts: The dry run.
        node: Gives the value.
        of_layers: Count the results that row layers add up among the latter.
    """
    is_given = layouts.cuts_inputs and _is_of_argument(node)
    if is_given or not has_gradient(node) or parameters_of(node) or node in layouts.copies:
        return True
    return not layouts.cuts_only and _is_for_parts(layouts, node, of_layers)


def _is_of_argument(node: fx.Node) -> bool:
    """Return whether a value is an argument of the graph, or made from one alone, as a bias with one dimension more."""
    while node.op in ("call_function", "call_method") and len(given := [*filter(has_gradient, node.all_input_nodes)]) == 1:
        (node,) = given
    return node.op == "placeholder"


def _is_for_parts(layouts: Layouts, node: fx.Node, of_layers: bool) -> bool:
    """Return whether a whole value has its gradient from added-up values and shared layers alone, and parameters beside."""
    if node in layouts.reduced or node in layouts.norms or str(node.target) in layouts.shared:
        return True
    split = layouts.splits.get(str(node.target)) if node.op == "call_module" else None
    if of_layers and split is not None and split.output == "reduced":
        return True
    if node.op in ("placeholder", "get_attr") or (node.op == "call_module" and _is_opaque(layouts, str(node.target))):
        return False
    if any(other.op == "get_attr" and str(other.target) in layouts.shared for other in node.all_input_nodes):
        return True
    tuples = [other for other in node.all_input_nodes if other.op.startswith("call") and gives_tensors(other)]
    found = [*tuples, *(other for other in node.all_input_nodes if has_gradient(other) and not parameters_of(other))]
    return bool(found) and all(_is_for_parts(layouts, other, of_layers) for other in found)


def _is_opaque(layouts: Layouts, path: str) -> bool:
    return path in layouts.opaque or bool(layouts.is_layer(layouts.fetch_attr(path)))


def dim_cut(layouts: Layouts, node: fx.Node, other: fx.Node) -> int | None:
    """Return along which dimension a node's argument is cut; None where it is used whole, or cut block by block."""
    if layouts.blocks_of(node) or node in layouts.cut_blocks:
        return None
    values = leaves((node.args, node.kwargs))
    found = {dim for place, dim in layouts.cut.get(node, {}).items() if values[place] is other}
    return found.pop() if len(found) == 1 else None


def may_reduce(layouts: Layouts, n: fx.Node) -> bool:
    """Return whether a partial result is worth adding up: of a product with parameters, or a sum or mean of one value."""
    return needs_statistics(layouts, n) or any(other in layouts.weights or parameters_of(other) for other in n.all_input_nodes)
