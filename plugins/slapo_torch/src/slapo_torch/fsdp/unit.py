"""One unit of FSDP2: parameters that are gathered together, and whose gradients are reduced together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, UnshardHandle, fully_shard
from torch.distributed.tensor import DTensor

from slapo_core import BuildError, successor
from slapo_training.gradient_hooks import cut_attributes

from .replica_spec import ReplicaSpec, replica_spec

REMEDY = "give fsdp_units=[] to have all parameters gathered for the whole step, or other units"
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class FreedParameter(torch.Tensor):
    """Stand-in for a parameter while its unit does not run: of the whole's shape and type, and whoever reads it fails."""

    @staticmethod
    def like(parameter: torch.Tensor) -> FreedParameter:
        """Return one for a parameter of this shape."""
        made: FreedParameter = torch.Tensor._make_wrapper_subclass(
            FreedParameter,
            parameter.shape,
            dtype=parameter.dtype,
            device=parameter.device,
            requires_grad=parameter.requires_grad,
        )
        made._is_param = True  # an nn.Parameter to who asks
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise BuildError(f"a parameter of a unit is read where that unit does not run; {REMEDY}")


@dataclass(eq=False)
class ShardedParameter:
    """One parameter.

    Args:
        holder: The module that has it for FSDP2.
        key: Its name in there.
        sharded: As FSDP2 keeps it between steps.
        local: The same memory as a plain tensor, with its facts: what the model has, and the optimizer steps.
        full_attributes: Tensors among the attributes of the whole parameter, of which ``local`` has rows.
        freed: What the model has within a step where it is not gathered.
        whole: As FSDP2 gathers it, in every step the same object.
        is_used: Whether it got a gradient on this rank in this step.
    """

    holder: nn.Module
    key: str
    sharded: DTensor
    local: nn.Parameter
    full_attributes: dict[str, torch.Tensor]
    freed: FreedParameter
    whole: nn.Parameter | None = None
    is_used: bool = False

    def gathered(self) -> nn.Parameter:
        """The whole parameter, with the facts and hooks it had before it was sharded over replicas."""
        if self.whole is None:
            self.whole = self.holder._parameters[self.key]
            spec = replica_spec(self.local)
            assert self.whole is not None
            assert spec is not None
            vars(self.whole).update(vars(successor(self.local, self.local.detach(), spec=spec.inner)) | self.full_attributes)
            self._take_hooks()
        return self.whole

    def _take_hooks(self) -> None:
        for table in _HOOKS:
            hooks = getattr(self.local, table, None)
            if getattr(self.whole, table, None) is not hooks:
                setattr(self.whole, table, hooks)

    def record_use(self) -> None:
        """Remember whether it has a gradient now."""
        self.is_used = self.is_used or (self.whole is not None and self.whole.grad is not None)

    def begin(self) -> None:
        """Begin a step: it is trained, and has the hooks, as what the model has."""
        self.is_used = False
        if self.whole is not None:
            self._take_hooks()
        if self.sharded.requires_grad != self.local.requires_grad:
            self.sharded.requires_grad_(self.local.requires_grad)
        self.freed.requires_grad_(self.local.requires_grad)

    def take_gradient(self, is_used: bool) -> None:
        """Move the reduced gradient to the local parameter."""
        found, self.sharded.grad = self.sharded.grad, None
        if found is not None and is_used:
            assert isinstance(found, DTensor)
            with torch.no_grad():
                self.local.grad = found.to_local()

    def drop_gradients(self) -> None:
        """Forget what a step that broke off left."""
        self.sharded.grad = None
        if self.whole is not None:
            self.whole.grad = None


class _ParameterHolder(nn.Module):
    """Has parameters of one type, which FSDP2 shards in here: the model's modules, and their traces, stay as they are."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for index, parameter in enumerate(parameters):
            self.register_parameter(str(index), parameter)

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        """Its backward has FSDP2 reduce the gradients."""
        return token * 1


class Unit:
    """Parameters that are gathered together, and whose gradients are reduced together.

    Args:
        path: Of its module; empty for the parameters of none, or of several units.
        parameters: Of this rank; the model still has them.
        mesh: With an axis ``dp``.
        everyone: The data-parallel and tensor-parallel ranks; None without tensor parallelism.

    Attributes:
        members: Its parameters, in order.
        owners: Where the model has them.
    """

    def __init__(
        self, path: str, parameters: Sequence[nn.Parameter], mesh: DeviceMesh, everyone: dist.ProcessGroup | None
    ) -> None:
        self.path = path
        self.owners: list[tuple[nn.Module, str, ShardedParameter]] = []
        self._device = torch.device(mesh.device_type)
        self._holders: list[FSDPModule] = []
        self._waiting: list[UnshardHandle | None] = []
        made: dict[int, ShardedParameter] = {}
        for same in _group_by_dtype(parameters):
            specs = [ReplicaSpec.of(parameter, mesh["dp"].get_group(), everyone) for parameter in same]
            for parameter in same:
                parameter.data = parameter.data.contiguous()
            holder = _ParameterHolder(same)
            made |= {id(old): each for old, each in zip(same, self._shard(holder, mesh, specs, same), strict=True)}
        self.members = [made[id(parameter)] for parameter in parameters]

    def _shard(
        self, holder: nn.Module, mesh: DeviceMesh, specs: Sequence[ReplicaSpec], replaced: Sequence[nn.Parameter]
    ) -> list[ShardedParameter]:
        unit = fully_shard(holder, mesh=mesh["dp"], reshard_after_forward=False)
        unit.set_reduce_scatter_unused_params(True)
        self._holders.append(unit)
        made: list[ShardedParameter] = []
        for (key, sharded), spec, old in zip(holder._parameters.items(), specs, replaced, strict=True):
            assert isinstance(sharded, DTensor)
            with torch.no_grad():
                local = successor(old, sharded.to_local(), spec=spec)
                full_attributes = cut_attributes(local, old.shape, 0, spec.cut)
                made.append(ShardedParameter(holder, key, sharded, local, full_attributes, FreedParameter.like(old)))
        return made

    @property
    def is_trained(self) -> bool:
        """Return whether some parameter gets a gradient."""
        return any(each.local.requires_grad for each in self.members)

    def install(self, form: str) -> None:
        """Give the model its parameters as they are ``"whole"``, ``"freed"`` or ``"local"``."""
        for module, name, each in self.owners:
            parameter = each.gathered() if form == "whole" else getattr(each, form)
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = parameter
            else:  # recurrent layers keep a list of their own
                setattr(module, name, parameter)

    def begin_gather(self) -> None:
        """Send the rows to the other replicas, and go on. Collective over these."""
        if not self._waiting:
            self._waiting = [holder.unshard(async_op=True) for holder in self._holders]

    def gather(self) -> None:
        """Give the model the whole parameters. Collective over the replicas."""
        self.begin_gather()
        for handle in self._waiting:
            if handle is not None:
                handle.wait()
        self._waiting = []
        self.install("whole")

    def free(self, form: str) -> None:
        """Free the whole parameters; the model gets the ``form`` that says so to who reads them, or its local ones."""
        for handle in self._waiting:
            if handle is not None:
                handle.wait()
        self._waiting = []
        for holder in self._holders:
            holder.reshard()
        self.install(form)

    def reduce(self, form: str) -> None:
        """Add the means of the replicas' gradients to those of the rows, and free. Collective over the replicas."""
        for each in self.members:
            each.record_use()
        for holder in self._holders:
            assert isinstance(holder, nn.Module)
            if any(parameter.requires_grad for parameter in holder.parameters()):
                with torch.enable_grad():
                    token = torch.zeros(1, device=self._device, requires_grad=True)
                    holder(token).backward()
        self.free(form)


def _group_by_dtype(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """FSDP2 reduces gradients of one type together."""
    found: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        found[parameter.dtype].append(parameter)
    return list(found.values())
