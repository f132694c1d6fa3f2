"""Construction of optimizers that step whole tensors, on ranks that hold shards of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, Program, is_sharded, parameter_facts, shard_spec

from ..distributed.ranks import all_reduce, stage_group, synchronized_rng
from ..model.named_tensors import parameters
from ..model.pieces import Piece, piece_of
from ..options.optimizer_blocks import OptimizerBlocks, blocks_of
from .probe.introspection import Optimizer, has_state, referenced_parameters, replace_parameters
from .probe.update_probe import UpdateDependence, probe
from .whole_tensor_optimizer import WholeTensorOptimizer
from .whole_tensors.exchange_routes import LocalBox
from .whole_tensors.stand_ins import OwnerStandIns, StandIns
from .whole_tensors.whole_tensor import WholeTensor, is_fused, whole_tensors_of

Group = dist.ProcessGroup | None
Make = Callable[[list[nn.Parameter]], Any]

MIN_SHARDED_NUMEL = 2**18
"""Number of elements of the smallest parameter that is stepped as a DTensor.

Time of a step in place over the time of owners, on two gloo ranks: LAMB 1.52 at 147,456 elements, 1.01 at 262,144, 0.67 at
589,824; LARS 0.96, 0.69 and 0.49. For smaller parameters DTensor's overhead per operation outweighs the messages.
"""


@dataclass(frozen=True)
class ParameterLayout:
    """Layout of the trained parameters on a rank.

    Args:
        named: This rank's parameters by first original name, in the model's order.
        group: Returns the group of ranks that together hold the whole tensor; None if this rank holds it alone.
        dtype: Dtype of the values that the optimizer steps; None for the parameters' dtypes.
        is_flat: True if the engine shards flattened parameters over replicas.
        refusal: The reason why the engine cannot step whole tensors, and a remedy; empty if it can.
    """

    program: Program
    named: Mapping[str, nn.Parameter]
    piece: Callable[[nn.Parameter], Piece]
    group: Callable[[nn.Parameter], Group]
    dtype: torch.dtype | None = None
    is_flat: bool = False
    blocks: Mapping[str, OptimizerBlocks] = field(default_factory=dict)
    refusal: str = ""

    @classmethod
    def of_engine(
        cls, program: Program, module: nn.Module, dtype: torch.dtype | None, is_flat: bool, refusal: str = ""
    ) -> ParameterLayout:
        """Return the layout of an engine that keeps tensor-parallel shards, or flattens them for its optimizer.

        The arguments are those of ``ParameterLayout``.
        """
        named = {name: each for name, each in parameters(module).items() if isinstance(each, nn.Parameter)}

        def group(parameter: nn.Parameter) -> Group:
            if is_flat:
                return stage_group(program)
            spec = shard_spec(parameter)
            return spec.group if spec is not None and is_sharded(parameter) else None

        return cls(program, named, lambda each: piece_of(each, shard_spec(each)), group, dtype, is_flat, refusal=refusal)

    def is_part(self, name: str, parameter: nn.Parameter) -> bool:
        """Return True if this rank's parameter differs from the whole tensor of the unmodified model."""
        # decided by the spec, which is equal on all ranks; by sizes, a rank that holds all rows would decide differently
        return self.is_flat or name in self.blocks or is_fused(parameter) or is_sharded(parameter)

    def with_blocks(self, given: Mapping[str, tuple[int, int | Sequence[int]]] | None) -> ParameterLayout:
        """Return the same layout with the option ``optimizer_blocks``; raise ``BuildError`` if one cannot be split so."""
        if not given:
            return self
        named = self.program.module.named_parameters(remove_duplicate=False)
        everywhere = {each for name, parameter in named for each in (parameter_facts(parameter).names or (name,))}
        for pattern in given:
            if not any(fnmatchcase(name, pattern) for name in everywhere):
                raise BuildError(
                    f"optimizer_blocks names {pattern!r}, which matches no parameter of the model; give a parameter's name"
                )
        shapes = {name: self.piece(parameter).full_shape for name, parameter in self.named.items()}
        return replace(self, blocks=blocks_of(given, shapes))

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.named.items() if parameter.requires_grad}

    @property
    def has_parts(self) -> bool:
        """True if some trainable parameter differs from the whole tensor of the unmodified model."""
        return any(self.is_part(name, parameter) for name, parameter in self.trained_parameters().items())


def probe_optimizer(optimizer: Optimizer, layout: ParameterLayout) -> UpdateDependence | None:
    """Probe the updates of an optimizer; return None if the rank has all parameters whole."""
    if not layout.has_parts and layout.program.axis_size("pp") == 1:
        return None
    return probe(optimizer)


class WholeTensorConstruction:
    """Makes an optimizer of whole tensors from an optimizer of the rank's parameters. Collective.

    Raises:
        BuildError: on every rank: the optimizer cannot be right on this layout.
    """

    def __init__(self, optimizer: Optimizer | None, finding: UpdateDependence | None, layout: ParameterLayout) -> None:
        self._layout = layout
        own = finding or UpdateDependence()
        depends = own.flat if layout.is_flat else own.shape
        is_alone = layout.is_flat or layout.program.axis_size("pp") > 1  # a coupled step is refused there
        joins = own.coupled or (bool(own.why_unknown) and not is_alone)
        flags = [depends and layout.has_parts, joins and layout.has_parts, own.coupled, own.draws, own.communicates]
        device = layout.program.mesh.device_type if layout.program.mesh is not None else "cpu"
        found = torch.tensor([int(flag) for flag in flags], device=device)
        depends, joins, coupled, self._draws, communicates = map(
            bool, all_reduce(found, layout.program.mesh, dist.ReduceOp.MAX).tolist()
        )
        self.is_needed = depends or joins
        self._check(optimizer, coupled and not self._draws, communicates)
        self._everywhere = joins
        self._optimizer, self._steps_shards = optimizer, dict[tuple[int, ...], bool]()
        self._stand_ins: list[StandIns] = []
        self._is_made = False
        self._by_source: dict[int, list[nn.Parameter]] = {}
        self._sources: dict[int, nn.Parameter] = {}
        if self.is_needed and optimizer is not None:
            self._make(layout.trained_parameters())

    def _check(self, optimizer: Optimizer | None, coupled: bool, communicates: bool) -> None:
        kind = "the optimizer" if optimizer is None else type(optimizer).__name__
        if self.is_needed and self._layout.refusal:
            raise BuildError(f"{kind} steps a parameter as a whole, and {self._layout.refusal}")
        if coupled and self._layout.program.axis_size("pp") > 1:
            what = "calls collectives itself" if communicates else "makes the step of one parameter depend on the others"
            raise BuildError(
                f"{kind} {what}, and each rank of a pipeline has only those of its stages; use pp=1, or an optimizer that "
                "steps each parameter for itself, with clip= of build for a norm over all"
            )

    def _make(self, named: Mapping[str, nn.Parameter]) -> None:
        groups: dict[tuple[int, ...], tuple[Group, list[WholeTensor]]] = {}
        for name, parameter in named.items():
            if self._layout.is_part(name, parameter):
                group = self._layout.group(parameter)
                ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
                piece, blocks = self._layout.piece(parameter), self._layout.blocks.get(name)
                dtype = self._layout.dtype or parameter.dtype
                groups.setdefault(ranks, (group, []))[1].extend(
                    whole_tensors_of(name, parameter, piece.full_shape, dtype, blocks)
                )
        for group, wholes in groups.values():
            for made in self._stand_ins_of(wholes, group):
                self._add(made)

    def _stand_ins_of(self, wholes: Sequence[WholeTensor], group: Group) -> Iterator[StandIns]:
        """Make stand-ins of a process group's parameters, DTensors if the optimizer steps these right. Collective."""
        dims = self._even_dims(wholes, group)
        parts = [whole for whole, dim in zip(wholes, dims, strict=True) if dim is not None]
        if parts:
            from .dtensors import DTensorStandIns  # noqa: PLC0415  torch.distributed.tensor takes a second

            assert group is not None
            yield DTensorStandIns(parts, [dim for dim in dims if dim is not None], group)
        if others := [whole for whole, dim in zip(wholes, dims, strict=True) if dim is None]:
            yield OwnerStandIns(others, group, self._everywhere)

    def _even_dims(self, wholes: Sequence[WholeTensor], group: Group) -> list[int | None]:
        """Return the sharded dimension of each parameter that is stepped as a DTensor, None for others. Collective."""
        none: list[int | None] = [None] * len(wholes)
        if group is None or group.size() == 1 or self._everywhere or self._draws or self._layout.is_flat:
            return none
        large = [math.prod(whole.shape) >= MIN_SHARDED_NUMEL for whole in wholes]
        if not any(large):
            return none
        from .dtensors import even_dim, mesh_over, steps_shards  # noqa: PLC0415  torch.distributed.tensor takes a second

        found = [even_dim(whole, self._layout.piece(whole.source), group) for whole in wholes]
        device = wholes[0].source.device
        flags = torch.tensor([is_large and dim is not None for is_large, dim in zip(large, found, strict=True)], device=device)
        flags = flags.int()
        dist.all_reduce(flags, dist.ReduceOp.MIN, group=group)
        ranks = tuple(dist.get_process_group_ranks(group))
        if flags.any() and ranks not in self._steps_shards:
            assert self._optimizer is not None
            is_new = not self._is_made  # an optimizer that has stepped cannot be probed
            self._steps_shards[ranks] = is_new and steps_shards(self._optimizer, mesh_over(group, device))
        return [dim if flag and self._steps_shards[ranks] else None for dim, flag in zip(found, flags.tolist(), strict=True)]

    def _add(self, made: StandIns) -> None:
        made.bind(*local_boxes(made.wholes, self._layout))
        made.make()
        self._stand_ins.append(made)
        for whole, parameter in zip(made.wholes, made.parameters, strict=True):
            self._by_source.setdefault(id(whole.source), []).append(parameter)
            self._sources[id(parameter)] = whole.source

    def step_tensors(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the tensors that the optimizer steps in the places of the rank's parameters."""
        return list(chain.from_iterable(self._by_source.get(id(each), [each]) for each in parameters))

    def optimizer(self, optimizer: Optimizer, make: Make | None, trainable: Sequence[nn.Parameter]) -> WholeTensorOptimizer:
        """Return the optimizer of whole tensors, made by ``make`` or given, with no message to other ranks."""
        try:
            inner = optimizer if make is None else make(self.step_tensors(trainable))
            if inner is optimizer and has_state(inner):
                raise BuildError(
                    "the optimizer has made a state for parts of parameters; give a factory, lambda parameters: ..."
                )
            # a given optimizer, and a factory that reads parameters elsewhere, have the rank's own parameters
            replace_parameters(inner, lambda parameter: self._by_source.get(id(parameter), [parameter]))
            randomness = (lambda: synchronized_rng_of_stage(self._layout.program)) if self._draws else nullcontext
            return WholeTensorOptimizer(inner, self._stand_ins, self._sources, self._add_stand_ins, randomness)
        finally:
            for each in self._stand_ins:
                each.release()

    def discard_unstepped(self, optimizer: WholeTensorOptimizer) -> None:
        known = {id(parameter) for parameter in referenced_parameters(optimizer.inner)}
        for each in self._stand_ins:
            if each.drop_unused(known) and each.wholes:
                each.bind(*local_boxes(each.wholes, self._layout))
        self._is_made = True
        self._stand_ins[:] = [each for each in self._stand_ins if each.wholes]
        optimizer.stand_ins[:] = self._stand_ins

    def _add_stand_ins(self, added: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], Sequence[StandIns]]:
        """Make stand-ins of parameters that are added later. Collective."""
        known = {id(parameter) for parameter in added}
        named = {name: each for name, each in self._layout.named.items() if id(each) in known}
        before = len(self._stand_ins)
        self._make(named)
        made = self._stand_ins[before:]
        return self.step_tensors(added), made


def local_boxes(
    wholes: Sequence[WholeTensor], layout: ParameterLayout
) -> tuple[Callable[[], list[nn.Parameter]], list[LocalBox]]:
    """Return this rank's parameters that have elements of whole tensors, and the boxes of these elements."""
    sources = list({id(whole.source): whole.source for whole in wholes}.values())
    places = {id(source): place for place, source in enumerate(sources)}
    holdings = []
    for number, whole in enumerate(wholes):
        for chunk in whole.chunks(layout.piece(whole.source).chunks()):
            holdings.append(LocalBox(number, places[id(whole.source)], chunk))
    return lambda: sources, holdings


def synchronized_rng_of_stage(program: Program) -> AbstractContextManager[None]:
    """Return a context in which the ranks of a stage use the same random numbers. Collective over them."""
    if (mesh := program.mesh) is None:
        return nullcontext()
    groups = [mesh.get_group(axis) for axis in ("dp", "tp") if program.axis_size(axis) > 1]
    return synchronized_rng(groups, mesh.device_type)
