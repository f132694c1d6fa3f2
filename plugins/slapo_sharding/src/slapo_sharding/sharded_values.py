"""Code between layers that mixes what ranks hold in parts: found at the first run.

What comes out of a module that is split along its output is followed through the torch functions that the model calls, with
torch's own rules as the types, as a dry run does (see ``layouts``). A softmax or a sum along the sharded dimension, a fused
output that is not taken apart as it was split, a layer that is given other parts than its own: each rank would compute
something, and it would be wrong. What has no rule, and what collectives return, is not followed further.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from traceback import walk_stack
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from slapo_core.errors import ScheduleError
from slapo_core.tracing.calls import is_metadata, name_of

from ._torch_private import MOVES, layouts_kept, mesh_of
from .layouts import as_meta, slice_bounds
from .rules import AppliedCut, applied_cut
from .syncing import REDUCING, Sync, map_input, map_output

_GIVEN_SIZES = frozenset("view reshape expand unflatten layer_norm rms_norm".split())
_PRODUCTS = frozenset("matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm linear".split())
_SUMMING = (*REDUCING, "function")
_CHANGING = ("scatter", "reduce_scatter", "all_to_all", "function")
_SPLITS = frozenset("split chunk tensor_split split_with_sizes unsafe_chunk unsafe_split".split())


@dataclass(frozen=True)
class Followed:
    """What is known of a value.

    Args:
        layout: Of all ranks' parts together, without data.
        owner: The layer it comes from.
        blocks: Sizes on this rank of the blocks that the sharded dimension is made of; empty for one.
    """

    layout: DTensor
    owner: nn.Module
    blocks: tuple[int, ...] = ()

    @property
    def dim(self) -> int:
        """The sharded dimension."""
        return self.layout.placements[0].dim  # type: ignore[attr-defined, no-any-return]


class MixedError(Exception):
    """An operation needs the parts of other ranks; ``owner`` is the layer that makes them."""

    def __init__(self, owner: nn.Module, reason: str) -> None:
        super().__init__(reason)
        self.owner = owner


class ShardedValues:
    """The sharded values of a running forward."""

    def __init__(self) -> None:
        self.known: Any = WeakIdKeyDictionary()
        """Tensor to what it is; None where it may be anything. What is not here is the same on every rank."""

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called: one that is split must be given what it was split for.

        Raises:
            MixedError: it is not.
        """
        applied, x = _split(module), _input(args, kwargs)
        value = self.known.get(x) if x is not None else None
        if applied is None or x is None or value is None or _syncs(module, "fwd_pre"):
            return
        kind, blocks = type(module).__name__, tuple(block * applied.spec.num_shards for block in value.blocks)
        if applied.cut.input != "sharded":
            raise MixedError(value.owner, f"a {kind} that is split along its output is given a part of its input")
        if type(value.layout.placements[0]) is not Shard:
            raise MixedError(value.owner, f"a {kind} that is split is given parts in another order")
        expected = applied.cut.dim % x.dim(), _blocks(applied)
        if (value.dim, blocks) != expected:
            given, wanted = (f"{list(sizes) or 'one block'} along {dim}" for dim, sizes in ((value.dim, blocks), expected))
            raise MixedError(value.owner, f"a {kind} that is split in {wanted} is given {given}")

    def leave(self, module: nn.Module, output: Any) -> None:
        """A module has returned: what is split along its output returns a sharded value."""
        applied, syncs = _split(module), _syncs(module, "fwd_post")
        if any(sync.op in _CHANGING for sync in syncs):
            self._lose(output)
        elif applied is not None and applied.cut.output == "sharded" and not applied.gathered and not syncs:
            map_output(partial(self._start, module, applied), output)

    def _start(self, module: nn.Module, applied: AppliedCut, x: torch.Tensor) -> torch.Tensor:
        ranks = applied.spec.num_shards
        if applied.spec.dealt is not None:
            self.known[x] = None
        else:
            layout = _layout(x, mesh_of(ranks), applied.cut.dim % x.dim())
            self.known[x] = Followed(layout, module, tuple(block // ranks for block in _blocks(applied)))
        return x

    def _lose(self, value: Any) -> None:
        for tensor in _tensors(value):
            self.known[tensor] = None

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any, running: Sequence[nn.Module]) -> Any:
        """Call a torch function; what it makes of sharded values is followed.

        Raises:
            MixedError: it needs the parts of other ranks.
        """
        values = [self.known[tensor] for tensor in _tensors((args, kwargs)) if tensor in self.known]
        if not values or _split(running[-1]) or is_metadata(func, name_of(func)):
            return func(*args, **kwargs)
        if None in values or _is_ours():
            result = func(*args, **kwargs)
            self._lose(result)
            return result
        given = pytree.tree_map(self._as_layout, (args, kwargs))  # before it is changed in place
        value, name = next((value for value in values if value.blocks), values[0]), name_of(func)
        contracts = any(tensor in self.known and self.known[tensor].dim == dim for tensor, dim in _contracted(name, args))
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, ValueError) as err:
            if isinstance(err, torch.OutOfMemoryError):
                raise
            raise MixedError(value.owner, f"{name} fails, {str(err).splitlines()[0]}") from err
        self._lose(result)
        if value.blocks and (name in _SPLITS or name == "__getitem__"):
            self._take_apart(name, args, result, value)
        elif _is_every_nth(name, args, value):
            self._follow_parts([result], value)
        elif not value.blocks or name not in _GIVEN_SIZES:
            reduced = any(sync.op in _SUMMING for module in running for sync in _syncs(module, "fwd_post"))
            self._follow(func, given, result, value, contracts, reduced)
        return result

    def _as_layout(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.known[value].layout if value in self.known else as_meta(value.detach())
        return torch.device("meta") if isinstance(value, torch.device) else value

    def _follow(self, func: Any, given: Any, result: Any, of: Followed, contracts: bool, reduced: bool) -> None:
        (args, kwargs), moved, fits = given, contracts and not reduced, {}
        for attempt in _attempts(name_of(func), args):
            try:
                with torch.no_grad(), warnings.catch_warnings(), layouts_kept():
                    warnings.simplefilter("ignore")
                    made = func(*attempt, **kwargs)
            except Exception as err:  # torch's rules raise all kinds of errors for what they cannot do
                moved = moved or any(word in str(err) for word in MOVES)
                continue
            placements = [layout.placements[0] for layout in _tensors(made) if isinstance(layout, DTensor)]
            if any(placement.is_partial() for placement in placements):
                moved = moved or not reduced
            elif _fits(made, result):
                fits[tuple(placements)] = made
        if moved and not fits:
            raise MixedError(of.owner, f"{name_of(func)} needs all of it")
        if len(fits) == 1:  # of one head it is not known whether it is the heads or their width that are sharded
            self._note(next(iter(fits.values())), result, of)

    def _note(self, made: Any, result: Any, of: Followed) -> None:
        for layout, value in zip(_tensors(made), _tensors(result), strict=True):
            if not isinstance(layout, DTensor) or layout.placements[0].is_replicate():
                self.known.pop(value, None)
            elif not of.blocks:
                self.known[value] = Followed(layout, of.owner)
            elif layout.placements == of.layout.placements and value.shape[of.dim] == sum(of.blocks):
                self.known[value] = Followed(layout, of.owner, of.blocks)

    def _take_apart(self, name: str, args: Any, result: Any, fused: Followed) -> None:
        """What is taken out of a fused output; it has to be a block."""
        dim, tensors = fused.dim, _tensors(result)
        starts = [sum(fused.blocks[:index]) for index in range(len(fused.blocks) + 1)]
        bounds = slice_bounds(args[1], as_meta(args[0].detach())) if name == "__getitem__" else None
        sizes = tuple(tensor.shape[dim] for tensor in tensors if tensor.dim() > dim)
        if name in _SPLITS and set(sizes) != {starts[-1]}:
            if sizes != fused.blocks:
                raise MixedError(fused.owner, f"{name} takes {list(sizes)} out of blocks of {list(fused.blocks)}")
            self._follow_parts(tensors, fused)
        elif bounds is not None and dim == args[0].dim() - 1:
            if not set(bounds) <= set(starts):
                raise MixedError(fused.owner, f"{list(bounds)} is cut out of blocks of {list(fused.blocks)}")
            if bounds in zip(starts, starts[1:], strict=False):
                self._follow_parts(tensors, fused)

    def _follow_parts(self, tensors: list[torch.Tensor], of: Followed) -> None:
        for tensor in tensors:
            self.known[tensor] = Followed(_layout(tensor, of.layout.device_mesh, of.dim), of.owner)


def _layout(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    return DTensor.from_local(as_meta(x.detach()), mesh, [Shard(dim)], run_check=False)


def _fits(made: Any, result: Any) -> bool:
    """Whether layouts are those of these values."""
    layouts = [layout.to_local() if isinstance(layout, DTensor) else layout for layout in _tensors(made)]
    return [layout.shape for layout in layouts] == [value.shape for value in _tensors(result)]


def _is_every_nth(name: str, args: Any, value: Followed) -> bool:
    """Whether each of n neighbours along the sharded dimension goes another way, and this rank has all n of each."""
    index = args[1] if name == "__getitem__" and isinstance(args[1], tuple) else ()
    last = index[-1] if index else None
    if not isinstance(last, slice) or (last.step or 1) == 1 or value.dim != args[0].dim() - 1:
        return False
    others = all(item is Ellipsis or item == slice(None) for item in index[:-1])
    return others and (last.start or 0) < last.step and last.stop is None and args[0].shape[-1] % last.step == 0


def _contracted(name: str, args: Any) -> list[tuple[torch.Tensor, int]]:
    """What a product adds up along: tensors, and the dimension of each."""
    left, right = args[1:3] if name in ("addmm", "baddbmm") and len(args) > 2 else (*args, None, None)[:2]
    if name not in _PRODUCTS or not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return []
    if name == "__rmatmul__":
        left, right = right, left
    return [(left, left.dim() - 1), (right, right.dim() - 1 if name == "linear" else max(right.dim() - 2, 0))]


def _attempts(name: str, args: Any) -> Iterator[Any]:
    """Arguments for all ranks' values together: as they are, or with a size that is this rank's multiplied, as of a view."""
    yield args
    if name not in _GIVEN_SIZES:
        return
    ranks = next(value for value in pytree.tree_leaves(args) if isinstance(value, DTensor)).device_mesh.size()
    leaves, spec = pytree.tree_flatten(args)
    for place, leaf in enumerate(leaves):
        if type(leaf) is int and leaf > 0:
            yield pytree.tree_unflatten([*leaves[:place], leaf * ranks, *leaves[place + 1 :]], spec)


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The input that syncs and cuts are about."""
    found: list[torch.Tensor] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(x)
        return x

    try:
        map_input(note, args, kwargs)
    except ScheduleError:  # none of floating point
        return None
    return found[0]


def _split(module: nn.Module) -> AppliedCut | None:
    applied = applied_cut(module)
    return applied if applied is not None and applied.spec.num_shards > 1 else None


def _blocks(applied: AppliedCut) -> tuple[int, ...]:
    return applied.spec.blocks if len(applied.spec.blocks) > 1 and not applied.cut.parts else ()


def _syncs(module: nn.Module, mode: str) -> list[Sync]:
    hooks = (module._forward_pre_hooks if mode == "fwd_pre" else module._forward_hooks).values()
    return [hook for hook in hooks if isinstance(hook, Sync) and hook.mode == mode]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_ours() -> bool:
    """Whether the code that calls the torch function is of the collectives and the like: they know what they do."""
    names = (str(frame.f_globals.get("__name__")) for frame, _ in walk_stack(sys._getframe(1)))
    watching = (__name__, f"{__package__}.foreign_reads")
    return next(name for name in names if name not in watching and not name.startswith("torch.")).startswith(f"{__package__}.")
