"""Comparison of a module on this rank's shards with the same module on whole values, once, at the first run.

A manual schedule has no dry run that knows all sizes, and torch's rules know most operations only. The comparison finds the
other faults: sizes that code reads from a sharded value, one element taken out of it, a value that goes through Python, NumPy
or an operator without a rule. The innermost module with whole inputs and outputs runs twice more, without gradients and
dropout: once as it did, and once on whole values (``module_rerun``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree

from slapo_core import gather_objects, get_logger
from slapo_tracing.nodes import Snapshot, in_function_transform, is_metadata, model_source, name_of
from slapo_tracing.recording import PythonRandomState

from ..communication import collectives
from ..communication._torch_private import no_modes
from ..communication.collectives import Group
from ..rules.sharding_rule import returns_shard, split_of
from ..splitting.attention_heads import counts_verified
from ..syncs.sync_hooks import REDUCING, syncs_of
from .module_rerun import Rerun, rerun_obstacle
from .value_tracking.tracked_value import SAME, TrackedValue, tensors_in

_NEAR = 1e-3


_CUTTING = ("scatter", "reduce_scatter", "all_to_all")
_GATHERING = ("all_gather", "function")
_EQUAL, _UNKNOWN, _DIFFERENT = range(3)
_FEW = 1 / 8
"""Fraction of integers and booleans that may differ, because rounding may change a choice."""


_DIFFERS_FROM_WHOLE = (
    "from here on it computes something else than the unmodified module does, which has all of the values: code takes the size "
    "or an element of a part for that of the whole; tensor_parallel() without plan= divides sizes that code takes from whole "
    "values; or gather the output of the layers before, sync('fwd_post', 'all_gather', axis=-1), with what follows whole"
)
_SUMMED_TWICE = (
    "sync('fwd_post') adds up what is the same on every rank already: it was reduced or gathered inside, or is made of what is "
    "whole; sync it once"
)


class RecordedCall:
    """Record of a call that can be repeated.

    Args:
        module: The module.
        args: Its positional inputs; tensors are copied, because the call may change them.
        kwargs: Its keyword inputs, likewise.

    Attributes:
        is_multiple: True if the results are those on whole values times the number of ranks.
    """

    is_multiple = False

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = module
        self.given = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), (args, kwargs))
        self.originals = [*_tensors((args, kwargs))]
        seen: set[int] = set()
        state = [vars(each) for each in module.modules()]
        self._before = [Snapshot(each, seen) for each in (*state, self.given)]
        self._random = PythonRandomState()

    def is_same_on_ranks(self, group: Group) -> bool:
        """Return whether all ranks make the same call, by sums of the inputs. Collective over the group."""
        with torch.no_grad(), no_modes():
            real = [x for x in _tensors(self.given) if x.layout is torch.strided and not (x.is_complex() or x.is_nested)]
            sums = [(tuple(x.shape), x.dtype, float(x.double().nan_to_num().sum())) for x in real]
        return len(set(gather_objects(repr(sums), None, group))) == 1

    def rerun(self, rerun: Rerun) -> list[torch.Tensor]:
        """Repeat the call and return the tensors of its result; the module's state is restored."""
        seen: set[int] = set()
        after = [Snapshot(value, seen) for value in (*(vars(each) for each in self.module.modules()), self.given)]
        random = PythonRandomState()
        try:
            for snapshot in self._before:
                snapshot.restore()
            self._random.restore()
            args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, self.given)
            return list(_tensors(rerun.run(self.module, args, kwargs)))
        finally:
            for snapshot in after:
                snapshot.restore()
            random.restore()


class ModuleComparison:
    """Comparison of the modules of a running forward.

    Args:
        roots: The models whose schedules are built.
        rerun_modules: Context in which called modules go to a ``Rerun`` instead of the checks.
        call: ``nn.Module.__call__``.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        rerun_modules: Callable[[Rerun], AbstractContextManager[None]],
        call: Callable[..., Any],
    ) -> None:
        self.roots = set(roots)
        self.inside = {module for root in self.roots for module in root.modules()}
        self.rerun_modules, self.call = rerun_modules, call
        self.covered: set[nn.Module] = set()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall | None:
        """Record the call of a module; return the record if the call may have to be repeated."""
        if module not in self.inside or split_of(module) is not None or not self._unchecked_modules(module):
            return None
        return RecordedCall(module, args, kwargs)

    def leave(self, call: RecordedCall, output: Any, known: Any, around: Iterable[nn.Module]) -> tuple[str, str] | None:
        """Compare a module that has returned; return the line of the first difference and the reason, or None.

        ``known`` has the layout of each tensor that is not replicated; ``around`` are the modules that still run. Collective
        over the group of the call.
        """
        module, layers = call.module, self._unchecked_modules(call.module)
        results, is_root = [known.get(x, SAME) for x in _tensors(output)], call.module in self.roots
        if not layers or not results or any(x in known for x in call.originals):
            return None
        if not is_root and (any(each is not SAME for each in results) or any(map(_reduces, around))):
            return None
        if (reason := rerun_obstacle([*module.modules()])) is not None:
            _skip(call, reason)
            return None
        group = next(group for each in layers if (group := _group(each)) is not None)
        if not call.is_same_on_ranks(group):
            _skip(call, "the ranks are given other values")
            return None
        verdict = self._verdict(call, results, len(layers), group)
        verdict = int(collectives.max_over_ranks(torch.tensor([verdict], device=_device(module)), group))
        if verdict == _UNKNOWN:
            _skip(call, "its results cannot be compared")
            return None
        self.covered |= layers
        return None if verdict == _EQUAL else self._explain_difference(call, group)

    def _unchecked_modules(self, module: nn.Module) -> set[nn.Module]:
        """Return the modules inside with sharded outputs that neither a trace nor a comparison has covered."""
        parts = filter(_returns_parts, module.modules())
        return {each for each in parts if each not in self.covered and not counts_verified(each)}

    def _verdict(self, call: RecordedCall, results: Sequence[Any], num_layers: int, group: Group) -> int:
        """Return this rank's verdict on the call."""
        found, has_drawn = [], False
        for is_whole in (False, True):
            rerun = Rerun(self.call, is_whole)
            try:
                with self.rerun_modules(rerun):
                    found.append(call.rerun(rerun))
            except Exception as err:  # it may fail on whole values if a user set sizes before the schedule was made
                get_logger().debug("%s cannot be repeated: %s", type(call.module).__name__, err)
                return _UNKNOWN
            has_drawn |= rerun.has_drawn
        parts, whole = found
        if not len(parts) == len(whole) == len(results):
            return _UNKNOWN
        near = _tolerance(call.module, [*parts, *whole]) * sqrt(num_layers)
        owns = [_expected_shard(x, known, group) for x, known in zip(whole, results, strict=True)]
        pairs = [(part, x) for part, x in zip(parts, owns, strict=True) if x is not None and part.shape == x.shape]
        if not pairs:
            return _UNKNOWN
        call.is_multiple = all(_is_near(part, x * collectives.num_ranks(group), near) for part, x in pairs)
        if all(_is_near(part, x, near) for part, x in pairs):
            return _EQUAL if len(pairs) == len(parts) or call.module in self.roots else _UNKNOWN
        return _UNKNOWN if has_drawn else _DIFFERENT

    def _explain_difference(self, call: RecordedCall, group: Group) -> tuple[str, str]:
        """Repeat the call once more; return the line of the first difference and the reason."""
        parts, whole = CallRecords(), CallRecords()
        for records in (parts, whole):
            rerun = Rerun(self.call, records is whole, records)
            with self.rerun_modules(rerun):
                call.rerun(rerun)
        line = first_difference(parts, whole, group)
        return line, _SUMMED_TWICE if call.is_multiple and _reduces(call.module) else _DIFFERS_FROM_WHOLE


def _returns_parts(module: nn.Module) -> bool:
    if returns_shard(module):
        return not any(sync.op in _GATHERING for sync in syncs_of(module, "fwd_post"))
    return any(sync.op in _CUTTING for sync in syncs_of(module) if sync.mode in ("fwd_pre", "fwd_post"))


def _reduces(module: nn.Module) -> bool:
    return split_of(module) is None and any(sync.op in REDUCING for sync in syncs_of(module, "fwd_post"))


def _group(module: nn.Module) -> Group:
    applied = split_of(module)
    return applied.spec.group if applied is not None else next(sync.group for sync in syncs_of(module))


def _device(module: nn.Module) -> torch.device:
    return next((x.device for x in module.parameters()), torch.device("cpu"))


def _skip(call: RecordedCall, reason: str) -> None:
    get_logger().debug("%s is not compared with its run on whole values: %s", type(call.module).__name__, reason)


def _expected_shard(whole: torch.Tensor, known: Any, group: Group) -> torch.Tensor | None:
    """Return this rank's shard of a whole result; None if its layout is unknown."""
    if not isinstance(known, TrackedValue):
        return whole
    if known.is_partial or group is None or not isinstance(known.layout.placement, Shard):
        return None
    dim, ranks = known.layout.dim, known.layout.ranks
    sizes = [size * ranks for size in known.layout.blocks] or [whole.shape[dim]]
    if sum(sizes) != whole.shape[dim] or any(size % ranks for size in sizes):
        return None
    return torch.cat([block.chunk(ranks, dim)[group.rank()] for block in torch.split(whole, sizes, dim)], dim)


def _tolerance(module: nn.Module, results: Iterable[torch.Tensor]) -> float:
    """Return the relative tolerance of results, from the coarsest dtype."""
    device = _device(module).type
    kinds = {x.dtype for x in (*module.parameters(), *results) if x.is_floating_point()}
    if torch.is_autocast_enabled(device):
        kinds.add(torch.get_autocast_dtype(device))
    eps = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    if device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        eps = max(eps, 2.0**-10)
    return max(1e-4, 4 * eps)


def _is_near(part: torch.Tensor, whole: torch.Tensor, near: float) -> bool:
    """Return whether two results are equal up to rounding."""
    if not (whole.is_floating_point() or whole.is_complex()):
        return bool((part != whole).float().mean() <= _FEW) if whole.numel() else True
    kind = torch.complex128 if whole.is_complex() else torch.float64
    one, other = part.to(kind).nan_to_num(), whole.to(kind).nan_to_num()
    apart, size = (one - other).abs(), other.abs()
    if not whole.numel() or not bool(apart.any()):
        return True
    return bool(apart.square().mean().sqrt() <= near * size.square().mean().sqrt() and apart.max() <= 8 * near * size.max())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of arguments or results, those in dataclasses as well."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


class Record(NamedTuple):
    """Tensor that the function ``name``, called at ``line``, returned."""

    name: str
    line: str
    shape: tuple[int, ...]
    power: float
    """Sum of the squares of its elements."""


class CallRecords(list[Record]):
    """List of the tensors that torch functions returned in a run, in order."""

    def __call__(self, func: Any, result: Any) -> None:
        """Add the result of a function, or the inputs of a layer."""
        name = name_of(func)
        if is_metadata(func, name) or in_function_transform():
            return
        line = model_source() or "an unknown line"
        for x in tensors_in(result):
            power = float(x.detach().abs().to(torch.float64).nan_to_num(0, 0, 0).square().sum())
            self.append(Record(name, line, tuple(x.shape), power))


def first_difference(parts: CallRecords, whole: CallRecords, group: Group) -> str:
    """Return the line of the first tensor that is not a shard of the whole run's. Collective over the group."""
    gathered: list[list[Record]] = gather_objects([*parts], None, group)
    everywhere = [list(made) for made in zip(*gathered, strict=False)]
    line = "an unknown line"
    for made, expected in zip_longest(everywhere, whole):
        if made is None or expected is None:
            return line
        line = str(made[0].line)
        if any((each.name, each.line) != (expected.name, expected.line) for each in made):
            return line
        total = sum(each.power for each in made)
        if made[0].shape == expected.shape:
            total /= len(made)
            fits = all(_are_close(each.power, expected.power) for each in made)
        else:
            sizes = zip(made[0].shape, expected.shape, strict=False)
            fits = len(made[0].shape) == len(expected.shape) and all(of in (size, size * len(made)) for size, of in sizes)
        if not fits or not _are_close(total, expected.power):
            return line
    return line


def _are_close(one: float, other: float) -> bool:
    return abs(one - other) <= _NEAR * max(abs(one), abs(other))
