"""Tensors without data of their own, such as zeros or one that is filled later, which each rank makes as a shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import fx

if TYPE_CHECKING:
    from .layout_records import LayoutError

_EMPTY = (torch.empty, "new_empty")
_FILLS = (*_EMPTY, torch.zeros, torch.ones, torch.full, "new_zeros", "new_ones", "new_full")


class ShardedFill(NamedTuple):
    """Rule by which each rank makes its shard of a tensor without data.

    Args:
        dim: Dimension along which it is sharded.
        sources: Layers that are at fault where the shard does not fit; none for constants, which are whole again then.
    """

    dim: int
    sources: frozenset[str]


def fills_to_shard(err: LayoutError) -> dict[fx.Node, ShardedFill]:
    """Return the fills among what a failed node computes with that could be shards of its other inputs' sizes.

    A tensor that is empty shares the faults of what is written into it. Of several dimensions of one size the one that lies
    where the other input is sharded is taken.
    """
    found, sharded = dict[fx.Node, ShardedFill](), err.sharded_dims()
    sizes = {size for _, size in sharded}
    for node in upstream_of(other for other in err.node.all_input_nodes if other not in err.layouts.sources):
        if node.target in _FILLS:
            sources = err.sources if node.target in _EMPTY else frozenset[str]()
            shape = node.meta["val"].shape
            dims = [dim for dim, size in enumerate(shape) if size in sizes]
            dims = [dim for dim in dims if (dim - len(shape), shape[dim]) in sharded] or dims
            found |= {node: ShardedFill(dims[-1], sources)} if dims else {}
    return found


def upstream_of(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the nodes that values are computed from, up to and with the first modules."""
    found = list(nodes)
    for node in found:
        if node.op != "call_module":
            found += [more for more in node.all_input_nodes if more not in found]
    return found
