"""Splits of layers and of parameters that forwards use directly, and the parts of fused projections, read from the graph."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from slapo_tracing.nodes import expect, function_name

SPLITS = ("split", "chunk", "tensor_split")
ADDS = ("add", "iadd", "add_")
VIEWS = ("view", "reshape", "unflatten")


@dataclass(frozen=True)
class LayerSplit:
    """Split of a layer.

    Args:
        output: ``"sharded"``: column-parallel, the output is sharded along the width or the channels and the input is
            replicated. ``"reduced"``: row-parallel, the input is sharded and the partial outputs are summed. ``"kept"``: input
            and output are sharded alike.
        blocks: Sizes of the parts of a fused layer's output. Each part is split by itself.
        replicated: Indices of the blocks that every rank holds whole, such as the keys of a single head. Their gradient is
            summed.
    """

    output: Literal["sharded", "reduced", "kept"]
    blocks: tuple[int, ...] = ()
    replicated: tuple[int, ...] = ()

    def local_numel(self, tensor: torch.Tensor, ranks: int) -> int:
        """Return the number of elements of a whole tensor of the layer that each rank holds."""
        replicated = sum(self.blocks[index] for index in self.replicated)
        whole = tensor.numel() * replicated // sum(self.blocks) if replicated else 0
        return whole + (tensor.numel() - whole) // ranks


@dataclass(frozen=True)
class ParameterSplit:
    """Split of one parameter.

    Args:
        dim: Dimension that is split.
        blocks: Sizes of the parts of a fused projection along ``dim``, each split by itself. Empty for one part.
        owner: Rank that holds the whole parameter. None if each rank holds a shard.
    """

    dim: int
    blocks: tuple[int, ...] = ()
    owner: int | None = None


_PERMUTATIONS = ("unsqueeze", "transpose", "permute", "movedim", "contiguous")


def next_split(split: LayerSplit, calls: list[fx.Node], dim: int) -> LayerSplit | None:
    """Return the next split to try for a layer whose split output does not fit; None if there is none.

    The first step splits the parts of a fused output along ``dim`` one by one. Further steps replicate the smaller parts.
    """
    blocks = split.blocks or fused_sizes(calls, dim)
    if not split.blocks:
        return LayerSplit("sharded", blocks) if blocks else None
    largest = max((blocks[place] for place in split.replicated), default=0)
    *smaller, _ = sorted({size for size in blocks if size > largest})
    replicated = tuple(place for place, size in enumerate(blocks) if smaller and size <= smaller[0])
    return replace(split, replicated=replicated) if smaller else None


def fused_sizes(calls: list[fx.Node], dim: int = -1) -> tuple[int, ...]:
    """Return the sizes of the parts taken out of the outputs along ``dim``; empty if an output is used as one."""
    found = {_part_sizes(call, dim % call.meta["val"].dim()) for call in calls}
    return found.pop() if len(found) == 1 else ()


def _part_sizes(call: fx.Node, dim: int) -> tuple[int, ...]:
    value, users = call.meta["val"], [user for user in call.users if user.target is not expect]
    if all(user.target is operator.getitem for user in users):
        return _tile_sizes([index_bounds(user.args[1], value, dim) for user in users], value.shape[dim])
    users = [user for user in users if function_name(user) != "size"]
    if len(users) != 1:
        return ()
    (user,) = users
    name = "glu" if _calls_glu(user) else function_name(user)
    if name in SPLITS:
        parts = sorted(user.users, key=lambda part: int(part.args[1]))  # type: ignore[arg-type]
        whole = sum(part.meta["val"].shape[dim] for part in parts) == value.shape[dim]
        return tuple(size for part in parts for size in _sizes_in_part(part, dim)) if whole and len(parts) > 1 else ()
    if name == "glu" and user.meta["val"].shape[dim] * 2 == value.shape[dim]:
        return (value.shape[dim] // 2,) * 2
    if name in VIEWS and user.meta["val"].dim() > value.dim():
        return _sizes_in_view(user, value, dim)
    if name in _PERMUTATIONS and isinstance(user.meta.get("val"), torch.Tensor):
        return _part_sizes(user, _permuted_dim(user, call, dim))
    return _part_sizes(user, dim) if keeps_shape(user, call) or adds_same_shapes(user) else ()


def _permuted_dim(node: fx.Node, given: fx.Node, dim: int) -> int:
    """Return the new index of a dimension behind a permutation, found by a stride that no other dimension has."""
    if function_name(node) == "contiguous":
        return dim
    shape = given.meta["val"].shape
    strides = [2 * sum(shape) ** (place + 1) for place in range(len(shape))]
    marked = torch.empty_strided(shape, strides, device="meta")
    args, kwargs = map_arg((node.args, node.kwargs), lambda other: marked if other is given else other.meta["val"])
    function: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
    return int(function(*args, **kwargs).stride().index(strides[dim]))


def _tile_sizes(bounds: list[tuple[int, int] | None], size: int) -> tuple[int, ...]:
    ordered = sorted({bound for bound in bounds if bound is not None})
    tiles = [0, *(stop for _, stop in ordered)] == [*(start for start, _ in ordered), size]
    return tuple(stop - start for start, stop in ordered) if tiles and None not in bounds else ()


def _sizes_in_view(view: fx.Node, value: torch.Tensor, dim: int) -> tuple[int, ...]:
    """Return the sizes of parts that a view has as a dimension, or that are taken out of it as groups of heads."""
    shape, width, before = view.meta["val"].shape, value.shape[dim], value.shape[:dim].numel()
    place = next((place for place in (dim, *range(len(shape))) if shape[:place].numel() == before), None)
    number = 1 if place is None else shape[place]  # a view may merge or split the dimensions before it
    if place is None or not 1 < number < width or width % number:
        return ()
    heads = _part_sizes(view, place)
    if any(size > 1 for size in heads):
        return tuple(size * width // number for size in heads)
    return (width // number,) * number


def _sizes_in_part(part: fx.Node, dim: int) -> tuple[int, ...]:
    """Return the size of a part, or of its two halves if the model splits it: keys and values, or a gate."""
    users = [user for user in part.users if user.target is not expect]
    is_split = len(users) == 1 and (function_name(users[0]) in (*SPLITS, "glu") or _calls_glu(users[0]))
    found = _part_sizes(part, dim) if is_split else ()
    return found if len(found) == 2 else (part.meta["val"].shape[dim],)


def keeps_shape(node: fx.Node, given: fx.Node) -> bool:
    """Return whether a node has a single input and returns its shape, as an activation does."""
    one, other = node.meta.get("val"), given.meta.get("val")
    is_alone = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and node.all_input_nodes == [given]
    return is_alone and one.shape == other.shape  # type: ignore[union-attr]


def adds_same_shapes(node: fx.Node) -> bool:
    """Return whether a node adds values of one shape, as an adapter adds its output to that of a layer."""
    values = (other.meta.get("val") for other in (node, *node.all_input_nodes))
    shapes = {value.shape for value in values if isinstance(value, torch.Tensor)}
    return function_name(node) in ADDS and len(node.all_input_nodes) > 1 and len(shapes) == 1


def permutes_dims(node: fx.Node) -> bool:
    """Return whether a node permutes dimensions or inserts one."""
    return function_name(node) in _PERMUTATIONS


def _calls_glu(node: fx.Node) -> bool:
    root = node.graph.owning_module
    return node.op == "call_module" and root is not None and isinstance(root.get_submodule(str(node.target)), nn.GLU)


def index_bounds(index: Any, value: torch.Tensor, dim: int = -1) -> tuple[int, int] | None:
    """Return start and stop along ``dim`` if ``value[index]`` slices that dimension and no other; else None."""
    whole = slice(None)
    items = index_items(index, value.dim())
    dim %= value.dim()
    if items is None or any(item != whole for place, item in enumerate(items) if place != dim):
        return None
    cut, size = items[dim], value.shape[dim]
    if isinstance(cut, slice):
        start, stop, step = cut.indices(size)
        return (start, stop) if step == 1 and stop > start else None
    picked = [each % size for each in (cut if isinstance(cut, list) else [cut])]
    return (picked[0], picked[-1] + 1) if picked == [*range(picked[0], picked[-1] + 1)] else None


def index_items(index: Any, dims: int) -> list[Any] | None:
    """Return an index as one item per dimension; None if it has items other than slices, integers and lists of these."""
    items = list(index) if isinstance(index, tuple) else [index]
    numbers = (each for item in items for each in (item if isinstance(item, list) else [item]))
    if not all(isinstance(each, slice | int) or each is Ellipsis for each in numbers) or True in items or False in items:
        return None
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (dims - len(items) + 1)
    items += [slice(None)] * (dims - len(items))
    return items if len(items) == dims else None
