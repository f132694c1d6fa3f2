"""FSDP units in one process, for estimates: they allocate, copy and free what ``Unit`` does, and send into fake groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Program
from slapo_training import StageParameters

from ..gradients._torch_private import FakeTensor
from .unit import FreedParameter
from .unit_runtime import UnitRuntime
from .wrap_policy import assign_parameters, can_shard, unit_paths


@dataclass(eq=False)
class FakeShardedParameter:
    """One parameter of a fake unit.

    Args:
        whole: The gathered parameter; its storage is empty while it is freed.
        freed: Stand-in; in the model while the parameter is not gathered.
        local: Rows of this rank, padded as those of the first replica.
        values: Copy of a gathered parameter with real values; None for a fake one.
        owners: Tables and names under which the stage holds it.
    """

    whole: nn.Parameter
    freed: FreedParameter
    local: nn.Parameter
    values: torch.Tensor | None = None
    owners: list[tuple[dict[str, nn.Parameter | None], str]] = field(default_factory=list)


class FakeUnit:
    """Parameters that are gathered and reduced together; has the methods of ``Unit``.

    Args:
        path: Path of the unit's module; empty for parameters of no unit.
        parameters: Fake tensors, as large as on one replica.
        group: Fake process group of the replicas.
    """

    def __init__(self, path: str, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.path, self._group, self._replicas = path, group, group.size()
        self.members = [self._member(parameter) for parameter in parameters]
        types = dict.fromkeys(parameter.dtype for parameter in parameters)
        self._holders = [[each for each in self.members if each.whole.dtype is dtype] for dtype in types]
        self._gathering: list[torch.Tensor] = []
        self._is_gathered = False

    @property
    def is_trained(self) -> bool:
        return any(each.whole.requires_grad for each in self.members)

    def begin_gather(self) -> None:
        if not self._gathering and not self._is_gathered:
            self._gathering = [self._begin_gather_of(members) for members in self._holders]

    def gather(self) -> None:
        self.begin_gather()
        for members in self._holders:
            gathered = self._gathering.pop(0) if self._gathering else None
            start = 0
            for each in members:
                _resize(each.whole, self._replicas * each.local.untyped_storage().nbytes())
                source = each.values
                if source is None and gathered is not None:
                    source = gathered[start : start + each.whole.numel()].view_as(each.whole)
                if source is not None and not self._is_gathered:
                    each.whole.data.copy_(source)  # the version counter stays, as when FSDP2 gathers
                start += self._replicas * each.local.numel()
            del gathered
        self._is_gathered = True
        self._install("whole")

    def free(self, form: str) -> None:
        """Free the whole parameters; ``form`` is ``"local"`` after a step, when the model does not run."""
        self._gathering.clear()
        for members in self._holders:
            _free(members)
        self._is_gathered = False
        self._install("freed")

    def reduce(self, form: str) -> None:
        """Move the gradients to this rank's rows, by the buffers of a reduce-scatter; then ``free``."""
        for members in self._holders:
            if trained := [each for each in members if each.whole.requires_grad]:
                self._reduce(members, trained)
        self.free(form)

    def _reduce(self, members: Sequence[FakeShardedParameter], trained: Sequence[FakeShardedParameter]) -> None:
        with torch.no_grad():
            gradients = []
            for each in trained:
                gradients.append(torch.zeros_like(each.whole) if each.whole.grad is None else each.whole.grad)
                each.whole.grad = None
            _free(members)
            scattered = self._buffer(trained)
            _copy_rows(gradients, scattered)
            last = gradients.pop()  # FSDP2's loop over gradients holds it until the reduction ends
            gradients.clear()
            reduced = scattered.new_empty(scattered.numel() // self._replicas)
            dist.reduce_scatter_single(reduced, scattered, group=self._group)
            if scattered.device.type == "cpu":
                torch.empty_like(scattered)  # gloo reduces a copy of its input
            del last
            start = 0
            for each in trained:
                gradient = reduced[start : start + each.local.numel()].view_as(each.local)
                start += each.local.numel()
                if each.local.grad is None:
                    each.local.grad = gradient
                else:
                    each.local.grad += gradient

    def _member(self, parameter: nn.Parameter) -> FakeShardedParameter:
        rows = -(-parameter.shape[0] // self._replicas)
        local = parameter.detach().new_empty((rows, *parameter.shape[1:]))
        freed = FreedParameter.stand_in_of(parameter)
        values = None if isinstance(parameter, FakeTensor) else parameter.detach().clone()
        _resize(parameter, 0)
        return FakeShardedParameter(parameter, freed, nn.Parameter(local, parameter.requires_grad), values)

    def _buffer(self, members: Sequence[FakeShardedParameter]) -> torch.Tensor:
        return members[0].local.detach().new_empty(sum(each.local.numel() for each in members) * self._replicas)

    def _begin_gather_of(self, members: Sequence[FakeShardedParameter]) -> torch.Tensor:
        """Start a gather of all rows of some parameters; return where it writes."""
        found = self._buffer(members)
        own = found[: found.numel() // self._replicas]
        _copy_rows([each.local.detach() for each in members], own)
        dist.all_gather_single(found, own, group=self._group, async_op=True)
        return found

    def _install(self, form: str) -> None:
        for each in self.members:
            for table, name in each.owners:
                table[name] = getattr(each, form)


def _copy_rows(sources: Iterable[torch.Tensor], target: torch.Tensor) -> None:
    """Copy tensors to the beginning of a flat one."""
    start = 0
    for each in sources:
        target[start : start + each.numel()].copy_(each.reshape(-1))
        start += each.numel()


def _free(members: Sequence[FakeShardedParameter]) -> None:
    for each in members:
        _resize(each.whole, 0)


def _resize(tensor: torch.Tensor, size: int) -> None:
    if (storage := tensor.untyped_storage()).nbytes() != size:
        storage.resize_(size)


class FakeShards(StageParameters):
    """Parameters of one stage that ``FSDPReplicas`` shards.

    Args:
        program: The program.
        stage: Index of the stage.
        patterns: ``Options.fsdp_units``.
        gathers_all: True if all units are gathered for the whole step, as with pipeline stages.
    """

    def __init__(self, program: Program, stage: int, patterns: Sequence[str] | None, gathers_all: bool) -> None:
        assert program.mesh is not None
        self._group, gathers_all = program.mesh["dp"].get_group(), gathers_all or len(program.stages) > 1
        self._replicas = self._group.size()
        self.units_ahead = 1 if patterns is None and not gathers_all else None
        held = {id(each) for each in program.stages[stage].module.parameters()}
        assigned = assign_parameters(program.module, unit_paths(program.module, patterns), held)
        self._assigned = {path: {id(each) for each in parameters if can_shard(each)} for path, parameters in assigned.items()}
        self._modules = {path: program.module.get_submodule(path) for path in assigned if path and not gathers_all}
        self._runtime: UnitRuntime | None = None

    def bind(self, module: nn.Module, originals: Mapping[int, torch.Tensor]) -> None:
        self.whole = [*module.parameters()]
        paths = {id(part): path for path, part in module.named_modules()}
        units: list[FakeUnit] = []
        running: list[FakeUnit] = []
        for path, ids in self._assigned.items():
            if some := [each for each in self.whole if id(originals[id(each)]) in ids]:
                runs = path in self._modules
                unit = FakeUnit(paths[id(self._modules[path])] if runs else "", some, self._group)
                (running if runs else units).append(unit)
        self._step_units = units
        members = {id(each.whole): each for unit in (*units, *running) for each in unit.members}
        self.held = [members[id(each)].local if id(each) in members else each for each in self.whole]
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if (member := members.get(id(parameter))) is not None:
                    member.owners.append((part._parameters, name))
        if running:
            self._runtime = UnitRuntime(module, running, is_observed=False)
        for unit in (*units, *running):
            unit.free("freed")

    def sizes(self, module: nn.Module) -> tuple[int, int]:
        numbers = nbytes = 0
        for each in module.parameters():
            rows = -(-each.shape[0] // self._replicas) if can_shard(each) else 0
            kept = rows * each[0].numel() if rows else each.numel()
            numbers, nbytes = numbers + kept, nbytes + kept * each.element_size()
        return nbytes, numbers

    def begin_step(self) -> None:
        for index, unit in enumerate(self._step_units):
            for upcoming in self._step_units[index : index + 2]:
                upcoming.begin_gather()
            unit.gather()

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        with self._runtime.microbatch(training=True) if self._runtime is not None else nullcontext():
            yield

    def end_step(self) -> None:
        for unit in self._step_units:
            unit.reduce("local")

    def close(self) -> None:
        if self._runtime is not None:
            self._runtime.close()
