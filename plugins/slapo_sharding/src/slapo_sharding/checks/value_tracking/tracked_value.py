"""Layouts of sharded and partial values, and calls of torch functions with layouts in place of data."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.utils import _pytree as pytree

from slapo_tracing.nodes import name_of

from ...communication.collectives import Group

GIVEN_SIZES = frozenset("view reshape expand unflatten layer_norm rms_norm".split())
_PRODUCTS = frozenset("matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm linear".split())
_HASHABLE = (type(None), bool, int, float, complex, str, types.EllipsisType, torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True)
class Layout:
    """Hashable metadata and placement of a tensor.

    Args:
        shape: Local shape; ``stride`` likewise.
        placement: None for a tensor that is not tracked.
        ranks: Number of ranks of the placement.
        whole: Global shape and stride.
        blocks: Local sizes of the blocks of a fused sharded dimension; empty for one block.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    placement: Placement | None = None
    ranks: int = 1
    whole: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    blocks: tuple[int, ...] = ()

    @property
    def dim(self) -> int:
        """Sharded dimension."""
        return self.placement.dim  # type: ignore[union-attr, no-any-return]

    def empty(self, mesh: DeviceMesh) -> torch.Tensor:
        """Return a meta tensor of this layout, a DTensor if it is tracked."""
        part = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if self.placement is None:
            return part
        shape, stride = self.whole
        return DTensor.from_local(part, mesh, [self.placement], run_check=False, shape=torch.Size(shape), stride=stride)


@dataclass(frozen=True)
class TrackedValue:
    """Layout of a sharded or partial value over ``group``, and the layer or synced module that made the value."""

    layout: Layout
    owner: nn.Module
    group: Group

    @property
    def is_partial(self) -> bool:
        """True if the value is partial."""
        return self.layout.placement is not None and self.layout.placement.is_partial()


def untracked_layout(x: torch.Tensor) -> Layout:
    """Return the layout of a tensor that is not tracked."""
    return Layout(x.shape, x.stride(), x.dtype, x.device)


def sharded_layout(x: torch.Tensor, dim: int, ranks: int, blocks: tuple[int, ...] = ()) -> Layout:
    """Return the layout of a value whose local shard along ``dim`` is ``x``."""
    sizes, steps = list(x.shape), x.stride()
    sizes[dim] *= ranks
    strides = [step * ranks if place != dim and step >= steps[dim] else step for place, step in enumerate(steps)]
    return Layout(x.shape, steps, x.dtype, x.device, Shard(dim), ranks, (tuple(sizes), tuple(strides)), blocks)


def partial_value(x: torch.Tensor, ranks: int) -> Layout:
    """Return the layout of a value that is partial over ``ranks`` ranks."""
    return Layout(x.shape, x.stride(), x.dtype, x.device, Partial(), ranks, (tuple(x.shape), x.stride()))


def from_dtensor(made: DTensor, device: torch.device, blocks: tuple[int, ...] = ()) -> Layout:
    """Return the layout of a DTensor on meta, for a tensor on ``device``."""
    part, ranks, whole = made.to_local(), made.device_mesh.size(), (tuple(made.shape), made.stride())
    return Layout(part.shape, part.stride(), part.dtype, device, made.placements[0], ranks, whole, blocks)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results of torch functions."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def makes_new(name: str) -> bool:
    """Return whether a function makes a new tensor of another one's type, such as ``x.new_zeros(3)``."""
    return name.startswith("new_")


Attempt = tuple[Any, ...]
"""Flat arguments for the global values."""

SAME = "the same on every rank"
Outcome = Layout | int | str | None
"""Layout of a result, or the dimension it is sharded along; ``SAME``; None if it is unknown."""


_SIMPLE = frozenset((*_HASHABLE, torch.memory_format, Layout))


class Slice(NamedTuple):
    """Hashable ``slice``; Python's own is not hashable before 3.12."""

    start: Any
    stop: Any
    step: Any


@dataclass(frozen=True)
class OpCall:
    """Call of a torch function with sharded values, from before it changed any.

    Args:
        func: The function.
        leaves: The flat arguments, with layouts in place of tensors.
        kinds: Their types, because numbers of different types can be equal.
        spec: Tree spec of the arguments.
        of: Layout of a sharded argument.
        results: Shape and device of each tensor that this rank got.
        reduced: True if a running module reduces its output over the ranks.
        counted: True if a running module is known to have local counts.
        around: Global state, see ``global_state``.
    """

    func: Callable[..., Any]
    leaves: tuple[Any, ...]
    kinds: tuple[type, ...]
    spec: Any
    of: Layout
    results: tuple[tuple[tuple[int, ...], torch.device], ...]
    reduced: bool
    counted: bool
    around: tuple[Any, ...] | None

    @property
    def name(self) -> str:
        """Name of the function."""
        return name_of(self.func)

    @property
    def is_cacheable(self) -> bool:
        """True if the answer depends on this call alone, and the call can be compared with others."""
        parts = [part for leaf in self.leaves if type(leaf) is Slice for part in leaf]
        is_simple = all(type(leaf) in (*_SIMPLE, Slice) for leaf in self.leaves) and all(
            type(each) in (int, type(None)) for each in parts
        )
        return self.around is not None and _is_torch_function(self.func) and is_simple

    @property
    def contracts(self) -> bool:
        """True if the call is a product that contracts a sharded dimension."""
        args, _ = pytree.tree_unflatten(list(self.leaves), self.spec)
        products = _contracted_dims(self.name, args)
        return any(isinstance(value, Layout) and value.placement and value.dim == dim for value, dim in products)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Call the function with these flat arguments."""
        args, kwargs = pytree.tree_unflatten([slice(*leaf) if type(leaf) is Slice else leaf for leaf in leaves], self.spec)
        made = self.func(*args, **kwargs)
        return args[0] if made is None and args else made

    def attempts(self) -> Iterator[Attempt]:
        """Yield arguments for the global values: as they are, or with one local size multiplied, for views."""
        yield self.leaves
        for place, leaf in enumerate(self.leaves) if self.name in GIVEN_SIZES else ():
            if type(leaf) is int and leaf > 0:
                yield (*self.leaves[:place], leaf * self.of.ranks, *self.leaves[place + 1 :])


def _contracted_dims(name: str, args: Any) -> list[tuple[Any, int]]:
    """Return the factors of a product and the contracted dimension of each."""
    left, right = args[1:3] if name in ("addmm", "baddbmm") and len(args) > 2 else (*args, None, None)[:2]
    if name not in _PRODUCTS or not all(isinstance(factor, (Layout, torch.Tensor)) for factor in (left, right)):
        return []
    if name == "__rmatmul__":
        left, right = right, left
    last = len(right.shape) - 1
    return [(left, len(left.shape) - 1), (right, last if name == "linear" else max(last - 1, 0))]


def _is_torch_function(func: Any) -> bool:
    """Return whether a function is torch's own; other code may read any state."""
    if isinstance(func, types.MethodWrapperType):  # the getter of a property
        func = func.__self__
    owner = getattr(func, "__objclass__", func)
    return isinstance(func, _FUNCTIONS) and str(getattr(owner, "__module__", "")).partition(".")[0] == "torch"


_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
)
