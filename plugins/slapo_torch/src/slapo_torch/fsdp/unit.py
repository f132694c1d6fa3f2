"""One unit of FSDP2: parameters that are gathered together and whose gradients are reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, UnshardHandle, fully_shard
from torch.distributed.tensor import DTensor

from slapo_core import BuildError, successor
from slapo_training.gradient_hooks import shard_attributes

from .replica_spec import ReplicaSpec, replica_spec

REMEDY = "give fsdp_units=[] to have all parameters gathered for the whole step, or other units"
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class FreedParameter(torch.Tensor):
    """Stand-in for a parameter while its unit does not run; has the full shape and dtype, and raises if it is read."""

    @staticmethod
    def stand_in_of(parameter: torch.Tensor) -> FreedParameter:
        made: FreedParameter = torch.Tensor._make_wrapper_subclass(
            FreedParameter,
            parameter.shape,
            dtype=parameter.dtype,
            device=parameter.device,
            requires_grad=parameter.requires_grad,
        )
        made._is_param = True  # isinstance(made, nn.Parameter) is True
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise BuildError(f"a parameter of a unit is read where that unit does not run; {REMEDY}")


@dataclass(eq=False)
class ShardedParameter:
    """One parameter that FSDP2 shards, in the forms that the model holds at different times.

    Args:
        sharded: The rows that FSDP2 keeps between steps.
        local: Plain tensor with facts on the memory of ``sharded``; in the model between steps, and stepped by the optimizer.
        full_attributes: Tensor attributes of the full parameter, of which ``local`` has rows.
        freed: Stand-in; in the model within a step while the parameter is not gathered.
        whole: The gathered parameter, the same object in every step; None before the first one.
        is_used: True if the parameter got a gradient on this rank in this step.
    """

    holder: nn.Module
    key: str
    sharded: DTensor
    local: nn.Parameter
    full_attributes: dict[str, torch.Tensor]
    freed: FreedParameter
    whole: nn.Parameter | None = None
    is_used: bool = False

    def gathered_parameter(self) -> nn.Parameter:
        """Return the gathered parameter, with the facts and hooks from before it was sharded."""
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
        self.is_used = self.is_used or (self.whole is not None and self.whole.grad is not None)

    def begin(self) -> None:
        """Begin a step: take ``requires_grad`` and hooks from the local parameter."""
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


class _ParameterHolder(nn.Module):
    """Module in which FSDP2 shards parameters of one dtype; the model's own modules and their traces do not change."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for index, parameter in enumerate(parameters):
            self.register_parameter(str(index), parameter)

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        """Return the token; its backward makes FSDP2 reduce the gradients."""
        return token * 1


class Unit:
    """Parameters that are gathered together and whose gradients are reduced together.

    Args:
        path: Path of the unit's module; empty for parameters of no unit or of several units.
        parameters: This rank's parameters, which the model still holds.
        everyone: Process group of data-parallel and tensor-parallel ranks; None without tensor parallelism.

    Attributes:
        owners: Modules and names under which the model holds each parameter.
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
        # FSDP2 reduces gradients of one dtype together
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            same = [parameter for parameter in parameters if parameter.dtype is dtype]
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
                full_attributes = shard_attributes(local, old.shape, 0, spec.cut)
                made.append(ShardedParameter(holder, key, sharded, local, full_attributes, FreedParameter.stand_in_of(old)))
        return made

    @property
    def is_trained(self) -> bool:
        return any(each.local.requires_grad for each in self.members)

    def install(self, form: str) -> None:
        """Install a form of each parameter in the model: ``"whole"``, ``"freed"`` or ``"local"``."""
        for module, name, each in self.owners:
            parameter = each.gathered_parameter() if form == "whole" else getattr(each, form)
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = parameter
            else:  # recurrent layers keep their own list of weights
                setattr(module, name, parameter)

    def begin_gather(self) -> None:
        """Start the all-gather without waiting for it. Collective over the replicas."""
        if not self._waiting:
            self._waiting = [holder.unshard(async_op=True) for holder in self._holders]

    def gather(self) -> None:
        """Wait for the all-gather, and install the whole parameters. Collective over the replicas."""
        self.begin_gather()
        for handle in self._waiting:
            if handle is not None:
                handle.wait()
        self._waiting = []
        self.install("whole")

    def free(self, form: str) -> None:
        """Free the whole parameters, and install ``form``: ``"freed"`` within a step, ``"local"`` after it."""
        for handle in self._waiting:
            if handle is not None:
                handle.wait()
        self._waiting = []
        for holder in self._holders:
            holder.reshard()
        self.install(form)

    def reduce(self, form: str) -> None:
        """Reduce-scatter gradients to their means over replicas, and ``free`` to ``form``. Collective over the replicas."""
        for each in self.members:
            each.record_use()
        for holder in self._holders:
            assert isinstance(holder, nn.Module)
            if any(parameter.requires_grad for parameter in holder.parameters()):
                with torch.enable_grad():
                    token = torch.zeros(1, device=self._device, requires_grad=True)
                    holder(token).backward()
        self.free(form)
