"""Validation and planning of a shard step, before anything changes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Schedule, ScheduleError, ShardSpec, shard_spec
from slapo_tracing.nodes import forward_wrappers

from ..communication import shard_ranges
from ..rules.parametrizations import source_parameters
from ..rules.rulebook import rules_of
from ..rules.sharding_rule import AppliedCut, Cut, applied_cut, holder_of, tensor_of
from . import attention_heads
from .persistent_hooks import reduces_gradient
from .shard_step import ShardStep, has_late_bias, needs_forward, user_code

Blocks = int | Sequence[int] | None


@dataclass
class ShardPlanner:
    """Planner of one call of ``shard``; it changes nothing."""

    schedule: Schedule
    name: str | Sequence[str]
    axis: int
    blocks: Blocks
    copied: Sequence[int] = ()
    gathered: bool = False
    uneven: bool = False

    def __post_init__(self) -> None:
        self.module, self.child = self.schedule.mod, self.schedule.name
        self.owner = parent.mod if (parent := self.schedule.parent) is not None else None
        names = (self.name,) if isinstance(self.name, str) or not isinstance(self.name, Iterable) else tuple(self.name)
        sources = (source_parameters(self.module, name) if isinstance(name, str) else (name,) for name in names)
        self.names = tuple(chain.from_iterable(sources))
        self.heads: tuple[shard_ranges.Ranges, ...] | None = None
        self.rank, self.size = self.schedule.rank, max(self.schedule.world_size, 1)
        self.group = self.schedule.group if self.size > 1 else None

    def plan(self) -> ShardStep:
        """Return the step; raise ``ScheduleError`` if it is illegal."""
        if self.rank < 0:
            raise self._error("this process is not in the schedule's group; create the schedule with a group it is in")
        if self.group is None and (processes := _unconnected_processes()) > 1:
            raise self._error(
                f"this is one of {processes} processes, WORLD_SIZE says, that are not connected to each other; "
                "call torch.distributed.init_process_group() before create_schedule()"
            )
        first, dim = self._main_parameter()
        cut = self._cut(self.module, first, dim)
        if extra := [name for name in self.names if name not in cut.dims]:
            raise self._error(f"{extra[0]!r} stays whole when {first!r} is split along {dim}; shard {first!r} alone")
        applied = applied_cut(self.module)
        if applied is not None:
            return ShardStep(self.module, self._renamed_cut(applied, cut, first))
        sizes = self._sizes(cut, first, dim)
        if self.copied:
            self._replicate_blocks(cut, sizes)
        owner = None if self.copied else self._head_owner(cut, sizes)
        spec = self._spec(self.module, cut, first, self._tensor(first), sizes)
        late = self.size > 1 and has_late_bias(self.module, cut)
        step = ShardStep(self.module, AppliedCut(cut, spec, late, self.names, self.gathered))
        self._add_tied_cuts(step, cut, first, sizes)
        if summed := next((name for _, name, tensor, _ in step.pieces if self.size > 1 and reduces_gradient(tensor)), None):
            raise self._error(
                f"the gradient of {summed!r} is summed over the ranks, which would add up those of different parts; "
                "leave sync('grad', 'all_reduce') out"
            )
        step.owner = owner
        return step

    def _main_parameter(self) -> tuple[str, int]:
        """Return the parameter with most dimensions, which the axis is for, and the axis counted from 0."""
        if not self.names:
            raise self._error("no parameter is named; give one, e.g. 'weight'")
        for name in self.names:
            if not isinstance(name, str):
                raise self._error(f"{name!r} is not the name of a parameter; give one, e.g. 'weight'")
            if tensor_of(self.module, name) is None:
                held = (*self.module._parameters, *self.module._buffers)
                known = [name for name in held if tensor_of(self.module, name) is not None]
                raise self._error(f"no parameter {name!r}; available: {', '.join(known) or 'none'}")
        first = max(self.names, key=lambda name: self._tensor(name).dim())
        rank = self._tensor(first).dim()
        if not _is_integer(self.axis) or not -rank <= self.axis < rank:
            raise self._error(f"axis {self.axis!r} is out of range for {first!r} with {rank} dimensions")
        return first, self.axis % rank

    def _cut(self, module: nn.Module, name: str, dim: int) -> Cut:
        try:
            return rules_of(self.schedule).cut(module, name, dim)
        except LookupError as err:
            raise self._error(f"{self._label(module, name)} {err.args[0]}") from err

    def _renamed_cut(self, applied: AppliedCut, cut: Cut, first: str) -> AppliedCut:
        """Return the record with more names, for parameters that an earlier step has split together with another."""
        spec = shard_spec(self._tensor(first))
        again = sorted({*applied.asked} & {*self.names})
        if again or applied.cut is not cut or spec is None:
            was = f"along {spec.dim}" if spec else f"together with {', '.join(map(repr, applied.cut.dims))}"
            raise self._error(f"{(again or [first])[0]!r} is already sharded, {was}; shard a parameter once")
        if self.blocks is not None and self._explicit_blocks(first, spec.full_shape[spec.dim]) != spec.blocks:
            raise self._error(f"{first!r} is tied to a parameter sharded with blocks {spec.blocks}; give the same")
        return replace(applied, asked=applied.asked + self.names, gathered=applied.gathered or self.gathered)

    def _sizes(self, cut: Cut, first: str, dim: int) -> tuple[int, ...]:
        known = shard_spec(self._tensor(first))
        if known is not None and self.blocks is None:
            return known.blocks
        width = (known.full_shape if known is not None else self._tensor(first).shape)[dim]
        if cut.parts and self.blocks is not None:
            raise self._error(f"the blocks of a {type(self.module).__name__} are known from its rule; leave out blocks")
        if cut.parts:
            return self._parts(cut, first, width)
        if self.blocks is not None:
            sizes = self._explicit_blocks(first, width)
            if len(sizes) > 1 and not cut.fusable:
                raise self._error(f"{first!r} cannot be split along {dim} in blocks; leave out blocks")
            return (width,) if self.gathered else sizes
        fusable = cut.output == "sharded" and cut.fusable and not self.gathered and self.size > 1
        found = attention_heads.fused_blocks(self.owner, self.child, width) if fusable else (width,)
        if found is None:
            raise self._error(
                f"{self.child!r} is a fused projection, which a plain split may mix up; "
                f"give blocks=[sizes along dim {dim}], or blocks=1 where a plain split is right"
            )
        return found

    def _parts(self, cut: Cut, name: str, width: int) -> tuple[int, ...]:
        number = cut.parts.get(name, 1)
        if width % number:
            raise self._error(f"{name!r} has size {width} along {cut.dims[name]}, which is not {number} equal blocks")
        return (width // number,) * number

    def _explicit_blocks(self, first: str, width: int) -> tuple[int, ...]:
        if isinstance(self.blocks, (bool, str)) or not isinstance(self.blocks, (int, Iterable)):
            raise self._error(f"blocks is {self.blocks!r}; give how many equal ones, or their sizes")
        if isinstance(self.blocks, int):
            if self.blocks < 1 or width % self.blocks:
                raise self._error(f"{first!r} has size {width}, which is not {self.blocks} equal blocks; give their sizes")
            return (width // self.blocks,) * self.blocks
        sizes = tuple(self.blocks)
        if not all(_is_integer(size) and size > 0 for size in sizes) or sum(sizes) != width:
            raise self._error(f"blocks {sizes} do not add up to the size {width} of {first!r}")
        return sizes

    def _add_tied_cuts(self, step: ShardStep, cut: Cut, first: str, sizes: tuple[int, ...]) -> None:
        """Add the modules that ties reach: every tensor is split once, every module that holds one is recorded."""
        waiting, seen = [(self.module, cut)], set()
        while waiting:
            module, cut = waiting.pop()
            earlier = applied_cut(module)
            done = step.cuts.get(module) if earlier is None else earlier.cut
            if done is not None:
                if done is not cut:
                    raise self._error(f"parameters of one {type(module).__name__} are tied along different dimensions")
                continue
            self._check_forward(module, cut)
            step.cuts[module] = cut
            for name, dim in cut.dims.items():
                tensor = tensor_of(module, name)
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                self._check_holder(module, name)
                is_first = module is self.module and name == first
                spec = step.record.spec if is_first else self._spec(module, cut, name, tensor, sizes)
                if shard_spec(tensor) is None:
                    step.pieces.append((module, name, tensor, spec))
                waiting += [
                    (holder, self._cut(holder, other, dim)) for holder, other in self._other_holders(tensor, module, name)
                ]
            self._check_attributes(module, cut, step.record.spec)

    def _check_holder(self, module: nn.Module, name: str) -> None:
        """Refuse a tensor of a child that other modules contain as well, because they would use the shard."""
        holder, inside = holder_of(module, name)[0], {*module.modules()}
        outer = (other for other in self.schedule.root_module.modules() if other not in inside)
        if holder is not module and any(holder in other.children() for other in outer):
            what = f"is in a {type(holder).__name__} that other modules have inside as well"
            raise self._error(f"{self._label(module, name)} {what}; leave the layer whole")

    def _check_attributes(self, module: nn.Module, cut: Cut, spec: ShardSpec) -> None:
        """Refuse attributes such as groups or heads that are no size of a parameter and that the ranks do not divide."""
        for name in (*cut.attributes, *cut.divided):
            if (value := getattr(module, name, 0)) % self.size and value != spec.full_shape[spec.dim]:
                kind = type(module).__name__
                raise self._error(f"{name} of the {kind} is {value}, not divisible by {self.size} ranks; use fewer ranks")

    def _other_holders(self, tensor: torch.Tensor, module: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
        """Yield the other holders, without outer modules that hold the tensor for a layer inside (BERT's head does)."""
        own = holder_of(module, name)
        for holder, other in self.schedule.places_of(tensor, own):
            is_around = holder is not module and rules_of(self.schedule).find(holder) is None and module in {*holder.modules()}
            if (holder, other) != own and not is_around:
                yield holder, other

    def _spec(self, module: nn.Module, cut: Cut, name: str, tensor: torch.Tensor, sizes: tuple[int, ...]) -> ShardSpec:
        """Return the spec of one tensor, which must equal the spec of an earlier step."""
        dim, known = cut.dims[name], shard_spec(tensor)
        shape = known.full_shape if known is not None else tuple(tensor.shape)
        if len(sizes) == 1 or cut.parts:
            sizes = self._parts(cut, name, shape[dim])
        if sum(sizes) != shape[dim]:
            what = f"dim {dim} of {self._label(module, name)} has size {shape[dim]}"
            raise self._error(f"{what}, the blocks add up to {sum(sizes)}")
        dealt = self.heads if self.heads is not None or known is None else known.uneven_ranges
        if dealt is None and any(size % self.size for size in sizes):
            dealt = shard_ranges.concatenated_ranges(sizes, [shard_ranges.block_ranges(size, self.size) for size in sizes])
            self._check_uneven(cut, f"dim {dim} of {self._label(module, name)} has size {shape[dim]}", sizes)
        if dealt is not None and not cut.uneven:
            what = f"a {type(module).__name__} has to have equal parts of {self._label(module, name)} on all ranks"
            raise self._error(f"{what}; use fewer ranks")
        spec = ShardSpec(dim, shape, self.rank, self.size, sizes, self.group, uneven_ranges=dealt)
        if known is not None and known != spec:
            was = f"already sharded along {known.dim} with blocks {known.blocks}"
            raise self._error(f"{self._label(module, name)} is {was}; shard it the same way")
        return spec

    def _check_uneven(self, cut: Cut, what: str, sizes: tuple[int, ...]) -> None:
        """Refuse uneven shards without ``uneven=True``, and a lookup table that is empty on the last rank."""
        first = next(size for size in sizes if size % self.size)
        what += f" with a block of {first}" if len(sizes) > 1 else ""
        if not self.uneven or not cut.uneven:
            hint = "pad it, give uneven=True" if cut.uneven else "pad it"
            raise self._error(f"{what}, not divisible by {self.size} ranks; {hint} or use another axis")
        start, stop = shard_ranges.shard_range(first, self.size, self.size - 1)
        if (cut.input, cut.output) == ("indices", "partial") and start == stop:
            raise self._error(f"{what}, of which the last of {self.size} ranks would get nothing; use fewer ranks")

    def _head_owner(self, cut: Cut, sizes: tuple[int, ...]) -> nn.Module | None:
        """Return the attention module that has to count local heads, and set the ranges of whole heads; None without one."""
        owner = self.owner
        if self.gathered or cut.output != "sharded" or not attention_heads.makes_heads(owner, self.child):
            return None
        assert owner is not None
        try:
            self.heads = attention_heads.head_ranges(owner, self.child, sizes, self.size)
        except LookupError as err:
            raise self._error(f"{err.args[0]}; use fewer ranks, or gathered=True and an all_gather of the output") from err
        return None if attention_heads.counts_local_heads(owner) else owner

    def _replicate_blocks(self, cut: Cut, sizes: tuple[int, ...]) -> None:
        """Set the ranges of ranks that replicate the ``copied`` blocks and split the others."""
        if (cut.input, cut.output) != ("replicated", "sharded") or self.gathered:
            raise self._error("copied is for a layer whose output stays sharded; leave it out")
        if not isinstance(self.copied, Iterable) or not {*self.copied} < {*range(len(sizes))}:
            raise self._error(f"copied is {self.copied!r}; give indices of some of the {len(sizes)} blocks, counted from 0")
        if bad := [size for place, size in enumerate(sizes) if place not in self.copied and size % self.size]:
            raise self._error(f"a block has size {bad[0]}, not divisible by {self.size} ranks; use fewer ranks")
        dealt = [
            (((0, size),),) * self.size if place in self.copied else shard_ranges.block_ranges(size, self.size)
            for place, size in enumerate(sizes)
        ]
        self.heads = shard_ranges.concatenated_ranges(sizes, dealt)

    def _check_forward(self, module: nn.Module, cut: Cut) -> None:
        """Refuse user code on the module, which would see a shard, and a wrapped forward that the cut's own must replace."""
        if self.size > 1 and (own := user_code(module)):
            where = "it" if module is self.module else f"the tied {type(module).__name__}"
            what = f"{where} has a {own} of its own that would see a part only"
            raise self._error(f"{what}; remove it or put it on a module around")
        if self.size > 1 and needs_forward(module, cut) and ("forward" in module.__dict__ or forward_wrappers(module)):
            raise self._error("the module's forward is wrapped already; shard it before what wraps it (checkpoint, fork_rng)")

    def _tensor(self, name: str) -> torch.Tensor:
        found = tensor_of(self.module, name)
        assert found is not None
        return found

    def _label(self, module: nn.Module, name: str) -> str:
        if module is self.module:
            return repr(name)
        path = next(path for path, other in self.schedule.root_module.named_modules() if other is module)
        return f"{name!r} of the tied {path!r}"

    def _error(self, message: str) -> ScheduleError:
        return ScheduleError(message, path=self.schedule.path, primitive="shard")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unconnected_processes() -> int:
    """Return the number of processes that a launcher started if ``torch.distributed`` is not initialized, else 1."""
    started = os.environ.get("WORLD_SIZE", "1")
    return int(started) if started.isdecimal() and not dist.is_initialized() else 1
