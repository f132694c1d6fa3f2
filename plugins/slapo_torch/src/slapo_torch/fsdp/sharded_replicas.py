"""Parameters, gradients and optimizer states sharded over the data-parallel axis, by torch's ``fully_shard`` (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from slapo_core import BuildError, Program, get_logger, successor
from slapo_training.distributed import stage_group
from slapo_training.model import StateSnapshot

from ..gradients.reduction import average_gradients
from .unit import REMEDY, ShardedParameter, Unit
from .unit_runtime import UnitRuntime
from .wrap_policy import assign_parameters, can_shard, is_empty_on_a_rank, unit_paths


class FSDPReplicas:
    """This rank's parameters, of which each replica keeps some rows.

    With pipeline stages, all units are gathered before a step and reduced after its last backward. Without stages, each unit
    is gathered and reduced as it runs. All replicas send the same messages, even if one of them fails.

    Between steps the model has plain tensors with a ``ReplicaSpec``. The model does not change before ``install_shards``, so
    that all ranks can first agree that no rank failed, e.g. for lack of memory.

    Args:
        program: The program, with a mesh axis ``dp``.
        module: This rank's stages.
        patterns: ``Options.fsdp_units``.

    Attributes:
        unit_runtime: Runtime that gathers units as they run; None if all units are gathered for the whole step.
    """

    def __init__(self, program: Program, module: nn.Module, patterns: Sequence[str] | None = None) -> None:
        mesh = program.mesh
        assert mesh is not None
        self._group, self._device = mesh["dp"].get_group(), torch.device(mesh.device_type)
        everyone = _dp_tp_group(program)
        assigned = assign_parameters(
            program.module, unit_paths(program.module, patterns), {id(each) for each in module.parameters()}
        )
        self._others = [p for parameters in assigned.values() for p in parameters if not can_shard(p)]
        if number := sum(map(is_empty_on_a_rank, self._others)):
            what = "data_parallel='fsdp' keeps %d parameters whole on each replica: a tensor-parallel rank holds all of each"
            get_logger().warning(what, number)
        self._units: list[Unit] = []
        self._replaced: dict[int, ShardedParameter] = {}
        for path, parameters in assigned.items():
            if some := [parameter for parameter in parameters if can_shard(parameter)]:
                self._units.append(unit := Unit(path, some, mesh, everyone))
                self._replaced |= {id(old): each for old, each in zip(some, unit.members, strict=True)}
        self._program = program
        self._own = [program.module, module, *(stage.module for stage in program.stages)]
        self._trees = self._own
        self._forward_units = [unit for unit in self._units if unit.path] if len(program.stages) == 1 else []
        self._step_units = [unit for unit in self._units if unit not in self._forward_units]
        self.unit_runtime: UnitRuntime | None = None
        self._has_patterns, self._ordered = patterns is not None, set[bool]()
        self._has_begun = self._is_running = False
        self._guard: RemovableHandle | None = None

    def install_shards(self, groups: Iterable[dict[str, Any]] = ()) -> None:
        """Install this rank's rows in the model, and in the parameter groups of an optimizer of the old parameters."""
        self._has_begun, replaced, root = True, self._replaced, self._program.module
        self._find_owners(self._own, replaced)
        self._install("local")
        for group in groups:
            found = [(parameter, replaced.get(id(parameter))) for parameter in group["params"]]
            group["params"] = [parameter if each is None else each.local for parameter, each in found]
        self._replaced = {}
        if self._forward_units:
            self.unit_runtime = UnitRuntime(root, self._forward_units, is_observed=self._program.axis_size("tp") > 1)
        if len(self._program.stages) == 1:
            self._guard = root.register_forward_pre_hook(self._check_running, prepend=True)

    def _check_running(self, module: nn.Module, args: Any) -> None:
        if not self._is_running:
            raise BuildError(
                "the model's parameters are sharded over replicas; run it by train_batch or eval_batch, with averaged weights "
                "inside of slapo.ema(engine).applied()"
            )

    def __deepcopy__(self, memo: object) -> FSDPReplicas:
        return self  # a copy of the model has the same rows and the same guard

    def unshard(self) -> None:
        """Restore whole parameters in the model. Collective over the replicas after ``install_shards``."""
        for unit in self._units if self._has_begun else ():
            unit.gather()
            for each in unit.members:
                each.local = cast(
                    nn.Parameter, successor(each.gathered_parameter(), each.gathered_parameter().detach().clone())
                )
            unit.free("local")
        if self.unit_runtime is not None:
            self.unit_runtime.close()
        if self._guard is not None:
            self._guard.remove()

    @property
    def members(self) -> list[ShardedParameter]:
        return [each for unit in self._units for each in unit.members]

    # ---- the model's tables

    def set_extra_modules(self, trees: Iterable[nn.Module]) -> None:
        """Set the modules that get the parameters beside the model's own.

        New modules are made with the gathered parameters.
        """
        known = {id(tree) for tree in self._trees}
        kept = {id(tree): tree for tree in [*self._own, *trees]}
        if known != kept.keys():
            self._find_owners([*kept.values()], {})
        if kept.keys() - known:
            self._install("whole")

    def _find_owners(self, trees: list[nn.Module], replaced: dict[int, ShardedParameter]) -> None:
        forms = {id(form): each for each in self.members for form in (each.local, each.freed, each.whole) if form is not None}
        forms |= replaced
        units = {id(each): unit for unit in self._units for each in unit.members}
        for unit in self._units:
            unit.owners = []
        self._trees = trees
        for module in {id(module): module for tree in trees for module in tree.modules()}.values():
            for name, parameter in module._parameters.items():
                if parameter is not None and (each := forms.get(id(parameter))) is not None:
                    units[id(each)].owners.append((module, name, each))

    def _install(self, form: str) -> None:
        for unit in self._units:
            unit.install(form)

    # ---- a step

    def run(self, work: Callable[[], torch.Tensor], training: bool) -> torch.Tensor:
        """Gather parameters and run the model by ``work``. Collective over the replicas.

        Without ``fsdp_units``, a first run that does not run the units in order is repeated with all units gathered. ``work``
        raises the same error on all ranks.
        """
        is_first = self.unit_runtime is not None and not self._has_patterns and training not in self._ordered
        state = StateSnapshot(self._program.module.modules()) if is_first else None
        self.gather()
        try:
            loss = work()
        except Exception as err:
            self.release()
            reason, remedy, _ = str(err).partition(f"; {REMEDY}")
            if state is None or not isinstance(err, BuildError) or not remedy:
                raise
            state.restore()
            self._gather_for_step(reason)
            return self.run(work, training)
        if self.unit_runtime is None or not self.unit_runtime.gathers_all:
            self._ordered.add(training)
        return loss

    def _gather_for_step(self, reason: str) -> None:
        """Gather all units for the whole step from now on."""
        assert self.unit_runtime is not None
        self.unit_runtime.close()
        self.unit_runtime, self._forward_units, self._step_units = None, [], self._units
        get_logger().warning("data_parallel='fsdp' gathers all parameters for the whole step: %s", reason)

    def gather(self) -> None:
        """Begin a step: gather the units that stay gathered for the whole step. Collective over the replicas."""
        self._is_running = True
        for each in self.members:
            each.begin()
        for unit in self._units:
            unit.install("freed")
        for index, unit in enumerate(self._step_units):
            for upcoming in self._step_units[index : index + 2]:
                upcoming.begin_gather()
            unit.gather()

    def release(self) -> None:
        """End a step without gradients: install this rank's rows."""
        self._is_running = False
        for each in self.members:
            each.sharded.grad = None
            if each.whole is not None:
                each.whole.grad = None
        for unit in self._units:
            unit.free("local")

    def num_unused(self) -> int:
        """Return the number of trainable parameters without a gradient on this rank."""
        trained = [each for each in self.members if each.local.requires_grad]
        for each in trained:
            each.record_use()
        return sum(not each.is_used for each in trained)

    def used_ids(self) -> set[int]:
        """Return the ids of parameters with a gradient on this rank at the last ``num_unused``."""
        return {id(each.local) for each in self.members if each.is_used}

    def reduce(self, some_unused: bool) -> None:
        """End a step: reduce-scatter mean gradients to the rows, and install these. Collective over the replicas.

        With ``some_unused`` a replica has parameters without a gradient; those that no replica used keep None.
        """
        self._is_running = False
        for unit in self._step_units:
            unit.reduce("local")
        trained = [each for each in self.members if each.local.requires_grad]
        used = [each.is_used for each in trained]
        if some_unused:
            anywhere = torch.tensor(used, dtype=torch.int32, device=self._device)
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self._group)
            used = [bool(number) for number in anywhere.tolist()]
        for each, is_used in zip(trained, used, strict=True):
            each.take_gradient(is_used)
        average_gradients([parameter for parameter in self._others if parameter.requires_grad], self._group)
        self._install("local")


def _dp_tp_group(program: Program) -> dist.ProcessGroup | None:
    """Return the group of all replicas of this rank's stages, row-major over ``dp`` and ``tp``; None without ``tp``.

    Raises:
        BuildError: a parameter is sharded over other ranks than the mesh axis ``tp``.
    """
    mesh = program.mesh
    assert mesh is not None
    if program.axis_size("tp") == 1:
        return None
    tensor_parallel = dist.get_process_group_ranks(mesh["tp"].get_group())
    for name, spec in program.shard_specs.items():
        if spec.num_shards > 1 and (spec.group is None or dist.get_process_group_ranks(spec.group) != tensor_parallel):
            raise BuildError(
                f"{name!r} is sharded over other ranks than the mesh's axis tp; use data_parallel='ddp', or that axis"
            )
    return stage_group(program)
