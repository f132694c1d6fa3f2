"""Code between layers that mixes what ranks hold in parts: found at the first run.

What comes out of a module that is split along its output is followed through the torch functions that the model calls, with
torch's own rules as the types, as a dry run does (see ``layouts``). A softmax or a sum along the sharded dimension, a fused
output that is not taken apart as it was split, a layer that is given other parts than its own: each rank would compute
something, and it would be wrong. Torch's rules refuse some of what ranks can do, too: random numbers decide then (``trial``).
It is an error where what was mixed goes into a layer that is split, or out of the model; to look at it is none. What has no
rule, and what collectives return, is not followed further.
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
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from slapo_core.errors import BuildError, ScheduleError
from slapo_core.logger import get_logger
from slapo_core.tracing.calls import is_metadata, name_of

from ._torch_private import MOVES, layouts_kept, mesh_of
from .layouts import as_meta, slice_bounds
from .rules import AppliedCut, applied_cut
from .syncing import REDUCING, Sync, map_input, map_output

_GIVEN_SIZES = frozenset("view reshape expand unflatten layer_norm rms_norm".split())
_PRODUCTS = frozenset("matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm linear".split())
_SUMMING = (*REDUCING, "function")
_CHANGING = ("scatter", "reduce_scatter", "all_to_all", "function")
_PICKS = frozenset("select index_select narrow".split())
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


class ShardedValues:
    """The sharded values of a running forward.

    Args:
        error: Makes the error for a layer whose output is mixed, with a reason, in the code that runs now.
    """

    def __init__(self, error: Callable[[nn.Module, str], BuildError]) -> None:
        self.error = error
        self.known: Any = WeakIdKeyDictionary()
        """Tensor to what it is: an error if it is mixed, None if it may be anything; others are the same on every rank."""

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called: one that is split must be given what it was split for.

        Raises:
            BuildError: it is not.
        """
        applied, x = _split(module), _input(args, kwargs)
        value = self.known.get(x) if x is not None else None
        if applied is None or x is None or value is None or _syncs(module, "fwd_pre"):
            return
        if isinstance(value, BuildError):
            raise value
        kind, blocks = type(module).__name__, tuple(block * applied.spec.num_shards for block in value.blocks)
        if applied.cut.input != "sharded":
            raise self.error(value.owner, f"a {kind} that is split along its output is given a part of its input")
        if type(value.layout.placements[0]) is not Shard:
            raise self.error(value.owner, f"a {kind} that is split is given parts in another order")
        expected = applied.cut.dim % x.dim(), _blocks(applied)
        if (value.dim, blocks) != expected:
            given, wanted = (f"{list(sizes) or 'one block'} along {dim}" for dim, sizes in ((value.dim, blocks), expected))
            raise self.error(value.owner, f"a {kind} that is split in {wanted} is given {given}")

    def leave(self, module: nn.Module, output: Any, last: bool) -> None:
        """A module has returned: what is split along its output returns a sharded value.

        Raises:
            BuildError: it is the ``last`` one to return, and returns what is mixed.
        """
        if last and (found := [known for known in self._of(output) if isinstance(known, BuildError)]):
            raise found[0]
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

    def _of(self, value: Any) -> list[Any]:
        return [self.known[tensor] for tensor in _tensors(value) if tensor in self.known]

    def _lose(self, value: Any, known: BuildError | None = None) -> None:
        for tensor in _tensors(value):
            self.known[tensor] = known

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any, running: Sequence[nn.Module]) -> Any:
        """Call a torch function; what it makes of sharded values is followed.

        Raises:
            BuildError: torch cannot do it with this rank's part.
        """
        values, name = self._of((args, kwargs)), name_of(func)
        if not values or _split(running[-1]) or is_metadata(func, name):
            return func(*args, **kwargs)
        mixed = next((value for value in values if isinstance(value, BuildError)), None)
        if mixed or None in values or _is_ours():
            result = func(*args, **kwargs)
            self._lose(result, mixed)
            return result
        value = next((value for value in values if value.blocks), values[0])
        given = _Call(func, args, kwargs, self.known, value)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, ValueError) as err:
            if isinstance(err, torch.OutOfMemoryError):
                raise
            raise self.error(value.owner, f"{name} fails, {str(err).splitlines()[0]}") from err
        self._lose(result)
        reduced = any(sync.op in _SUMMING for module in running for sync in _syncs(module, "fwd_post"))
        try:
            self._follow(given, args[0] if result is None and args else result, reduced)
        except _Mixed as err:
            self._lose(args[0] if result is None and args else result, self.error(value.owner, str(err)))
        except Exception as err:  # whatever code gives to torch: the check must not be what fails
            get_logger().debug("what %s returns is not followed: %s", name, err)
        return result

    def _follow(self, given: _Call, result: Any, reduced: bool) -> None:
        name, of = name_of(given.func), given.of
        if of.blocks and (name in _SPLITS or name == "__getitem__"):
            return self._take_apart(name, given.args, result, of)
        if of.blocks and name in _GIVEN_SIZES | _PICKS:
            return None
        moved, summed, fits = [], False, {}
        for attempt in given.attempts():
            try:
                with torch.no_grad(), warnings.catch_warnings(), layouts_kept():
                    warnings.simplefilter("ignore")
                    made = given.run(attempt)
            except Exception as err:  # torch's rules raise all kinds of errors for what they cannot do
                moved += [attempt] if any(word in str(err) for word in MOVES) else []
                continue
            placements = [layout.placements[0] for layout in _tensors(made) if isinstance(layout, DTensor)]
            if any(placement.is_partial() for placement in placements):
                sums = all(type(placement) is not Partial or placement.reduce_op == "sum" for placement in placements)
                sums = sums and all(type(placement) is Partial or not placement.is_partial() for placement in placements)
                summed, moved = summed or (reduced and sums), moved if reduced and sums else [*moved, attempt]
            elif _fits(made, result):
                fits[tuple(placements)] = made
        if len(fits) == 1:  # of one head it is not known whether it is the heads or their width that are sharded
            self._note(next(iter(fits.values())), result, of)
        elif not fits and not summed:
            self._try(given, moved, result, reduced)
        return None

    def _try(self, given: _Call, moved: list[Any], result: Any, reduced: bool) -> None:
        """See with random numbers whether ranks compute parts of what all together would."""
        dims: list[int | None] = []
        picks = name_of(given.func) in _PICKS | {"__getitem__"}
        if picks and min(map(torch.Tensor.dim, _tensors(result))) < given.of.layout.dim():
            return  # one head after the other
        mixed = given.contracts and not reduced
        for attempt in moved:
            try:
                dims = dims or trial(given, attempt)
            except _Mixed:
                mixed = True
        if mixed and not dims:
            raise _Mixed(f"{name_of(given.func)} needs all of it")
        for tensor, dim in zip(_tensors(result), dims, strict=False):
            if dim is None:
                self.known.pop(tensor, None)
            else:
                self.known[tensor] = Followed(_layout(tensor, given.of.layout.device_mesh, dim), given.of.owner)

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
                raise _Mixed(f"{name} takes {list(sizes)} out of blocks of {list(fused.blocks)}")
            self._follow_parts(tensors, fused)
        elif bounds is not None and dim == args[0].dim() - 1:
            if not set(bounds) <= set(starts):
                raise _Mixed(f"{list(bounds)} is cut out of blocks of {list(fused.blocks)}")
            if bounds in zip(starts, starts[1:], strict=False):
                self._follow_parts(tensors, fused)

    def _follow_parts(self, tensors: list[torch.Tensor], of: Followed) -> None:
        for tensor in tensors:
            self.known[tensor] = Followed(_layout(tensor, of.layout.device_mesh, of.dim), of.owner)


class _Mixed(Exception):
    """An operation needs the parts of other ranks."""


class _Call:
    """A call of a torch function with sharded values, as it was before it changed any.

    Args:
        func: The function.
        args: Of the call.
        kwargs: Of the call.
        known: What is sharded among them.
        of: One of these.

    Attributes:
        leaves: The arguments one by one.
        layouts: The same, with layouts in the place of tensors.
        contracts: Whether it is a product that adds up along a sharded dimension.
    """

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: Any, known: Any, of: Followed) -> None:
        self.func, self.args, self.of = func, args, of
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.followed = [known.get(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in self.leaves]
        self.layouts = [
            value.layout if value else _as_layout(leaf) for leaf, value in zip(self.leaves, self.followed, strict=True)
        ]
        products = _contracted(name_of(func), args)
        self.contracts = any(tensor in known and known[tensor].dim == dim for tensor, dim in products)
        name = name_of(func)
        if name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__")):
            self.leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]

    def run(self, leaves: Sequence[Any]) -> Any:
        """Call the function with these arguments."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        made = self.func(*args, **kwargs)
        return args[0] if made is None and args else made

    def attempts(self) -> Iterator[list[Any]]:
        """Arguments for all ranks' values together: as they are, or, as of a view, with a size of this rank's multiplied."""
        yield self.layouts
        for place, leaf in enumerate(self.layouts) if name_of(self.func) in _GIVEN_SIZES else ():
            if type(leaf) is int and leaf > 0:
                yield [*self.layouts[:place], leaf * self.of.layout.device_mesh.size(), *self.layouts[place + 1 :]]


def trial(call: _Call, attempt: Sequence[Any]) -> list[int | None]:
    """What ranks compute part by part, of random numbers.

    Args:
        call: The call of one rank.
        attempt: Arguments for all ranks' values together.

    Returns:
        The dimension along which each result is sharded, None for one that is the same on every rank; empty where it cannot be
        tried.

    Raises:
        _Mixed: what ranks compute are no parts of the whole result.
    """
    ranks, generator = call.of.layout.device_mesh.size(), torch.Generator().manual_seed(0)
    whole, parts = list(attempt), [list(call.leaves) for _ in range(ranks)]
    for place, (leaf, value) in enumerate(zip(call.leaves, call.followed, strict=True)):
        if isinstance(leaf, torch.Tensor) and value is None:
            if call.of.layout.to_local().shape[call.of.dim] in leaf.shape:  # it may have been made as long as this rank's part
                return []
            whole[place] = leaf.detach().clone()
            for part in parts:
                part[place] = leaf.detach().clone()
        elif value is not None:
            if not leaf.is_floating_point():
                return []
            numbers = [torch.randn(leaf.shape, generator=generator).to(leaf.device, leaf.dtype) for _ in range(ranks)]
            for part, own in zip(parts, numbers, strict=True):
                part[place] = own.clone()
            blocks = zip(*(torch.split(own, value.blocks or own.shape[value.dim], value.dim) for own in numbers), strict=True)
            whole[place] = torch.cat([part for block in blocks for part in block], value.dim)
        elif isinstance(leaf, torch.device):
            whole[place] = leaf
    try:
        devices = {leaf.device for leaf in call.leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda}
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            before = torch.get_rng_state()
            results = [_tensors(call.run(leaves)) for leaves in (whole, *parts)]
            if not torch.equal(before, torch.get_rng_state()):
                return []
    except Exception:  # sizes that are this rank's, operators of any kind
        return []
    if len({len(found) for found in results}) > 1:  # heads one by one, say
        return []
    dims = [_dim_of(_by_rank(expected, call.of), list(found)) for expected, *found in zip(*results, strict=False)]
    return [] if call.of.blocks and call.of.layout.shape in [value.shape for value in results[0]] else dims  # it is fused still


def _by_rank(whole: torch.Tensor, of: Followed) -> torch.Tensor:
    """A value like ``of``, each rank's blocks side by side; any other as it is."""
    if not of.blocks or whole.shape != of.layout.shape:
        return whole
    ranks = of.layout.device_mesh.size()
    blocks = [block.chunk(ranks, of.dim) for block in torch.split(whole, [size * ranks for size in of.blocks], of.dim)]
    return torch.cat([part for rank in zip(*blocks, strict=True) for part in rank], of.dim)


def _dim_of(expected: torch.Tensor, found: list[torch.Tensor]) -> int | None:
    """Along which dimension these are the parts; None where each is the whole."""

    kind = torch.complex128  # takes in all others
    near = max(1e-4, 8 * torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0)

    def same(whole: torch.Tensor, part: torch.Tensor) -> bool:
        return whole.shape == part.shape and torch.allclose(whole.to(kind), part.to(kind), rtol=near, atol=near, equal_nan=True)

    if all(same(expected, part) for part in found):
        return None
    for dim in range(expected.dim()):
        parts = expected.chunk(len(found), dim)
        if len(parts) == len(found) and all(map(same, parts, found)):
            return dim
    raise _Mixed


def _as_layout(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return as_meta(value.detach()) if value.layout is torch.strided else value
    return torch.device("meta") if isinstance(value, torch.device) else value


def _layout(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    return DTensor.from_local(as_meta(x.detach()), mesh, [Shard(dim)], run_check=False)


def _fits(made: Any, result: Any) -> bool:
    """Whether layouts are those of these values."""
    layouts = [layout.to_local() if isinstance(layout, DTensor) else layout for layout in _tensors(made)]
    return [layout.shape for layout in layouts] == [value.shape for value in _tensors(result)]


def _contracted(name: str, args: Any) -> list[tuple[torch.Tensor, int]]:
    """What a product adds up along: tensors, and the dimension of each."""
    left, right = args[1:3] if name in ("addmm", "baddbmm") and len(args) > 2 else (*args, None, None)[:2]
    if name not in _PRODUCTS or not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return []
    if name == "__rmatmul__":
        left, right = right, left
    return [(left, left.dim() - 1), (right, right.dim() - 1 if name == "linear" else max(right.dim() - 2, 0))]


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
