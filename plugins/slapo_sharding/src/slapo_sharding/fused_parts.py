"""Parts of a fused projection's output: how a model takes them out, and how wide they are."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor, Shard
from torch.fx.node import map_arg
from torch.nn import functional as F

from slapo_core.tracing.calls import function_name
from slapo_core.tracing.graph_ops import expect

from .local_sizes.arguments import leaves
from .node_values import has_tensors

if TYPE_CHECKING:
    from .layouts import Layouts

_SPLITS = ("split", "chunk", "tensor_split")
_VIEWS = ("view", "reshape")


class Fused:
    """The output of a fused layer before its parts are taken out; no layout says how it is sharded.

    Args:
        whole: The output of all ranks together, without data.
        sizes: Sizes of the parts.
        dim: Dimension that is made of the parts, counted from 0.
    """

    def __init__(self, whole: torch.Tensor, sizes: tuple[int, ...], dim: int) -> None:
        self.whole, self.sizes, self.dim = whole, sizes, dim

    def part(self, n: fx.Node, args: Any, kwargs: Any, glu: nn.GLU | None = None) -> tuple[Any, int, tuple[int, ...]]:
        """Return what a node takes out: whole tensors, the dimension that is sharded, and the sizes that have to be divided.

        The node calls ``glu``, where one is given.

        Raises:
            ValueError: it is no split or chunk, no slice, and no view with the parts as a dimension.
        """
        name, whole, sizes, dim = function_name(n), self.whole, self.sizes, self.dim
        if glu is not None:
            name, args, kwargs = "glu", (self, glu.dim), {}
        if name in _SPLITS:
            parts = getattr(whole, name)(*args[1:], **kwargs)
            if tuple(part.shape[dim] for part in parts) == sizes:
                return parts, dim, () if name == "chunk" else tuple(dict.fromkeys(sizes))
        elif name == "glu":
            value = F.glu(whole, *args[1:], **kwargs)
            if len(sizes) == 2 and value.shape[dim] == sizes[0] == sizes[1]:
                return value, dim, ()
        elif name in _VIEWS:
            value = getattr(whole, name)(*args[1:], **kwargs)
            if value.dim() > whole.dim() and value.shape[dim] == len(sizes):
                follows = leaves(args[1:])[dim + 1 :][:1] == [-1]  # from the number of all elements
                return value, dim + 1, () if follows else (value.shape[dim + 1],)
        elif n.target is operator.getitem and (bounds := slice_bounds(args[1], whole, dim)) is not None:
            starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
            if bounds in zip(starts, starts[1:], strict=False):
                return whole.narrow(dim, bounds[0], bounds[1] - bounds[0]), dim, tuple(bound for bound in bounds if bound)
        raise ValueError("the parts of a fused output are not taken out one by one")


def keeps_parts(layouts: Layouts, n: fx.Node, fused: Fused) -> bool:
    """Return whether a node does the same to every number along the dimension of the parts, as an activation does.

    Args:
        layouts: The dry run.
        n: The node.
        fused: The output that it is given.
    """
    (given,) = n.all_input_nodes if len(n.all_input_nodes) == 1 else (n,)
    if not _keeps_shape(n, given) or (n.op == "call_module" and has_tensors(layouts.fetch_attr(str(n.target)))):
        return False
    sharded = layouts._shard(fused.whole, fused.dim)
    args, kwargs = map_arg((n.args, n.kwargs), lambda _: sharded)
    try:
        value = layouts._whole(n, args, kwargs) if n.op == "call_module" else layouts._call(n, args, kwargs)
    except (RuntimeError, ValueError):
        return False
    return isinstance(value, DTensor) and value.placements == (Shard(fused.dim),)


def fused_sizes(calls: list[fx.Node], dim: int = -1) -> tuple[int, ...]:
    """Return the sizes of the parts that the model takes out of outputs along ``dim``; empty when it uses these as one."""
    found = {_parts(call, dim % call.meta["val"].dim()) for call in calls}
    return found.pop() if len(found) == 1 else ()


def _parts(call: fx.Node, dim: int) -> tuple[int, ...]:
    value, users = call.meta["val"], [user for user in call.users if user.target is not expect]
    if all(user.target is operator.getitem for user in users):
        bounds = [slice_bounds(user.args[1], value, dim) for user in users]
        ordered = sorted({bound for bound in bounds if bound is not None})
        tiles = [0, *(stop for _, stop in ordered)] == [*(start for start, _ in ordered), value.shape[dim]]
        return tuple(stop - start for start, stop in ordered) if tiles and None not in bounds else ()
    if len(users) != 1:
        return ()
    name = "glu" if _calls_glu(users[0]) else function_name(users[0])
    if name in _SPLITS:
        parts = [user.meta["val"].shape for user in users[0].users]
        whole = sum(shape[dim] for shape in parts) == value.shape[dim]
        return tuple(shape[dim] for shape in parts) if whole and len(parts) > 1 else ()
    if name == "glu" and users[0].meta["val"].shape[dim] * 2 == value.shape[dim]:
        return (value.shape[dim] // 2,) * 2
    if name in _VIEWS:
        shape = users[0].meta["val"].shape
        number = shape[dim] if len(shape) > value.dim() else 0
        return (value.shape[dim] // number,) * number if number > 1 else ()
    return _parts(users[0], dim) if _keeps_shape(users[0], call) else ()


def _keeps_shape(node: fx.Node, given: fx.Node) -> bool:
    """Return whether a node gives a value of the shape of the only one that it is given, as an activation does."""
    one, other = node.meta.get("val"), given.meta.get("val")
    is_alone = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and node.all_input_nodes == [given]
    return is_alone and one.shape == other.shape  # type: ignore[union-attr]


def _calls_glu(node: fx.Node) -> bool:
    root = node.graph.owning_module
    return node.op == "call_module" and root is not None and isinstance(root.get_submodule(str(node.target)), nn.GLU)


def slice_bounds(index: Any, value: torch.Tensor, dim: int = -1) -> tuple[int, int] | None:
    """Return start and stop along ``dim``, when ``value[index]`` cuts that one and leaves the others whole."""
    whole = slice(None)
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(item, slice) or item is Ellipsis for item in items):
        return None
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [whole] * (value.dim() - len(items) + 1)
    items += [whole] * (value.dim() - len(items))
    dim %= value.dim()
    cut = items[dim] if len(items) == value.dim() else None
    if not isinstance(cut, slice) or any(item != whole for place, item in enumerate(items) if place != dim):
        return None
    start, stop, step = cut.indices(value.shape[dim])
    return (start, stop) if step == 1 and stop > start else None
