"""Sharded parameters that an optimizer steps in place as DTensors, without gathering them.

A probe on the real process group tests whether an optimizer steps shards correctly and communicates statistics alone. Equal
shards of large parameters enter; stand-ins that share the shards' memory leave. Optimizer state is sharded or replicated, so
checkpoints equal those of owner ranks: per-element state is sharded like its parameter, and any other tensor is whole on every
rank, as a replicated DTensor, or as a plain tensor for a scalar.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..distributed._torch_private import MessageWatch, set_local
from ..gradient_hooks.sharded_hooks import is_shaped_like
from ..model.pieces import Piece
from .probe.introspection import Optimizer, optimizers_in
from .probe.probe_runs import Cut, ProbeRuns, Size, is_close, isolate
from .probe.update_probe import sizes_of
from .whole_tensors.exchange_routes import LocalBox
from .whole_tensors.stand_ins import StandIns, Tensors
from .whole_tensors.whole_tensor import WholeTensor, local_of, stand_in


class DTensorStandIns(StandIns):
    """DTensor parameters over the memory of the rank's shards.

    Ranks of the group hold equal shards of each tensor along ``dims``, in rank order.
    """

    is_in_place = True

    def __init__(self, wholes: Sequence[WholeTensor], dims: Sequence[int], group: dist.ProcessGroup) -> None:
        super().__init__(wholes, group)
        self._dims = list(dims)
        self.mesh = mesh_over(group, self._device)
        self._owned = set(range(len(self.wholes)))
        self._holdings: list[LocalBox] = []

    def _keep(self, kept: Sequence[int]) -> None:
        self._dims = [self._dims[number] for number in kept]
        self._owned = set(range(len(kept)))

    def bind(self, tensors: Tensors, holdings: Sequence[LocalBox], labels: Sequence[int] | None = None) -> None:
        super().bind(tensors, holdings, labels)
        self._holdings = sorted(holdings, key=lambda holding: holding.whole)
        assert [holding.whole for holding in self._holdings] == list(range(len(self.wholes)))

    def make(self) -> None:
        for whole, dim, local in zip(self.wholes, self._dims, self._locals(), strict=True):
            value = DTensor.from_local(local, self.mesh, [Shard(dim)], run_check=False)
            self.parameters.append(stand_in(whole, value, {}))

    @torch.no_grad()
    def fetch_all(self, labels: Container[int] | None) -> None:
        values = self._values()
        gradients = [values[holding.place].grad for holding in self._holdings]
        known = self._has_gradient(gradients)
        locals_ = self._locals()
        for number in self._indices_of(labels):
            parameter, local, gradient = self.parameters[number], locals_[number], gradients[number]
            set_local(parameter, local)
            parameter.grad = None
            if known[number]:
                own = torch.zeros_like(local) if gradient is None else self._own(number, gradient)
                parameter.grad = DTensor.from_local(own, self.mesh, [Shard(self._dims[number])], run_check=False)

    @torch.no_grad()
    def scatter(self, labels: Container[int] | None = None) -> None:
        values = self._values()
        for number in self._indices_of(labels):
            holding, local = self._holdings[number], local_of(self.parameters[number].detach())
            value = holding.of(values[holding.place].detach())
            if value.data_ptr() != local.data_ptr():  # the two may share memory
                value.copy_(local)

    def release(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _locals(self) -> list[torch.Tensor]:
        values = self._values()
        return [self._own(number, values[holding.place].detach()) for number, holding in enumerate(self._holdings)]

    def _own(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shard in the rank's tensor or gradient: a view, or a copy if the dtype differs."""
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        return self._holdings[number].of(dense).to(self.wholes[number].source.device, self.wholes[number].dtype)

    def _has_gradient(self, gradients: Sequence[torch.Tensor | None]) -> list[bool]:
        """Return for each stand-in whether some rank has a gradient; all ranks must reduce the same statistics. Collective."""
        flags = torch.tensor([int(each is not None) for each in gradients], dtype=torch.int32).to(self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in flags.tolist()]


def mesh_over(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    # DTensor caches by ranks and axis names; a cached mesh of the same name may have a destroyed group
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(f"shards_{group.group_name}",))


def even_dim(whole: WholeTensor, piece: Piece, group: dist.ProcessGroup) -> int | None:
    """Return the dimension along which ranks hold equal shards in rank order; None for any other layout."""
    own = vars(whole.source).values()
    if whole.spans is not None or any(
        is_shaped_like(each, shape) for each in own for shape in (whole.shape, whole.source.shape)
    ):
        return None
    cut = [dim for dim, ranges in enumerate(piece.ranges) if ranges != ((0, whole.shape[dim]),)]
    if len(cut) != 1 or whole.shape[cut[0]] % group.size():
        return None
    step = whole.shape[cut[0]] // group.size()
    is_share = piece.ranges[cut[0]] == ((group.rank() * step, (group.rank() + 1) * step),)
    return cut[0] if is_share and 0 not in whole.shape else None


def normalize_state(optimizer: Optimizer) -> None:
    """Bring the state of sharded parameters into this form after a step. Collective if the step left another form."""
    for each in optimizers_in(optimizer):
        for parameter, state in each.state.items():
            if isinstance(parameter, DTensor) and isinstance(state, dict):
                for key, value in state.items():
                    if isinstance(value, DTensor) and (new := _match_placements(value, parameter)) is not value:
                        state[key] = new


def _match_placements(value: DTensor, parameter: DTensor) -> torch.Tensor:
    if value.dim() == 0:
        return value.full_tensor()
    form = parameter.placements if value.shape == parameter.shape else (Replicate(),)
    return value if value.placements == form else value.redistribute(placements=form)


def check_normalized(optimizer: Optimizer) -> None:
    """Refuse state that a checkpoint could not restore.

    Raises:
        ValueError: a sharded tensor is not in the state of its parameter, or a tensor is neither sharded nor replicated.
    """
    for each in optimizers_in(optimizer):
        for parameter, state in each.state.items():
            is_part = isinstance(parameter, DTensor)
            for value in state.values() if isinstance(state, dict) else [state]:
                is_known = is_part and isinstance(value, torch.Tensor)
                if is_known and not isinstance(value, DTensor) and value.dim():
                    raise ValueError("it keeps a plain tensor for a sharded parameter")
                if not is_known and has_parts(value):
                    raise ValueError("it keeps sharded tensors inside other values")
        rest = [value for key, value in each.state_dict().items() if key != "state"]
        if has_parts(rest):
            raise ValueError("it keeps sharded tensors beside the state of its parameters")


def has_parts(value: Any) -> bool:
    """Return True if a value, or a nested list, tuple or dict, has a DTensor."""
    if isinstance(value, dict):
        return any(map(has_parts, value.values()))
    return any(map(has_parts, value)) if isinstance(value, list | tuple) else isinstance(value, DTensor)


def step_state(parameter: torch.Tensor, elements: Mapping[Any, torch.Tensor], rest: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return loaded state of a sharded stand-in, or a plain parameter, in the form of its steps.

    ``elements`` is per-element state of the rank's shard, by the optimizer's keys.
    """
    if not isinstance(parameter, DTensor):
        return {**elements, **rest}
    mesh, device = parameter.device_mesh, parameter.device
    parts = {
        key: DTensor.from_local(each.to(device), mesh, parameter.placements, run_check=False) for key, each in elements.items()
    }
    more = {
        key: DTensor.from_local(each.to(device), mesh, [Replicate()], run_check=False)
        if isinstance(each, torch.Tensor) and each.dim()
        else each
        for key, each in rest.items()
    }
    return {**parts, **more}


def shard_of(parameter: DTensor) -> tuple[int, int, int]:
    """Return the sharded dimension of a stand-in, and start and size of this rank's shard."""
    dim = parameter.placements[0].dim  # type: ignore[attr-defined]
    size = parameter.to_local().shape[dim]
    return dim, parameter.device_mesh.get_local_rank() * size, size


def shares_of(parameter: DTensor, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state of a stand-in from the state of the whole parameter."""
    elements = {key: each for key, each in state.items() if isinstance(each, torch.Tensor) and each.shape == parameter.shape}
    rest = {key: each for key, each in state.items() if key not in elements}
    place = shard_of(parameter)
    return step_state(parameter, {key: each.narrow(*place).clone() for key, each in elements.items()}, rest)


_STATISTIC = 2**10
"""Number of elements of the largest allowed message; DTensor may gather a smaller parameter instead of reducing it."""


def steps_shards(optimizer: Optimizer, mesh: DeviceMesh) -> bool:
    """Return True if a new optimizer steps shards like whole parameters, without gathering them. Collective over the mesh.

    Small copies are stepped, all sharded or some; after each phase the state goes through the form of a checkpoint.
    """
    group, device = mesh.get_group(), mesh.device_type
    with isolate():
        sizes = [_divisible(size, mesh.size()) for size in reversed(sizes_of(optimizer))]
        all_runs = [ProbeRuns(optimizer, size) for size in sizes]
        kinds: list[Any] = [None] * mesh.size()
        dist.all_gather_object(kinds, [(type(optimizer).__qualname__, each.shapes) for each in all_runs], group=group)
        if any(kind != kinds[0] for kind in kinds):
            return False
        for runs in all_runs:
            is_right = torch.tensor(int(_is_right(runs, mesh)), device=device)
            dist.all_reduce(is_right, dist.ReduceOp.MIN, group=group)
            if not is_right.item():
                return False
    return True


def _is_right(runs: ProbeRuns, mesh: DeviceMesh) -> bool:
    """Return True if this rank's shards are stepped right. Collective; an error occurs at the same point on all ranks."""
    try:
        whole = runs.run_first()
        if runs.is_sparse or runs.draws:
            return False
        number = len(runs.shapes)
        ways = [
            _shard_functions(mesh, [0] * number),
            *(_shard_functions(mesh, [1 if at % 2 == odd else None for at in range(number)]) for odd in (0, 1)),
        ]
        found = True
        for cuts in ways:
            with MessageWatch(max(_STATISTIC, *(max(shape, default=1) for shape in runs.shapes))):
                added = runs.run(cuts, after_step=_after_step)
            pairs = [(part, cuts[at % number](full)) for at, (part, full) in enumerate(zip(added, whole, strict=True))]
            found &= all(is_close(local_of(part), local_of(full)) for part, full in pairs)
    except Exception:
        return False
    return found


def _after_step(optimizer: Optimizer, is_last: bool) -> None:
    normalize_state(optimizer)
    check_normalized(optimizer)
    if is_last:
        for each in optimizers_in(optimizer):
            for parameter, state in each.state.items():
                if isinstance(parameter, DTensor):
                    elements = {key: value for key, value in state.items() if _is_sharded(value, parameter)}
                    rest = {key: local_of(value) for key, value in state.items() if key not in elements}
                    each.state[parameter] = step_state(
                        parameter, {key: local_of(value) for key, value in elements.items()}, rest
                    )


def _is_sharded(value: Any, parameter: DTensor) -> bool:
    return isinstance(value, DTensor) and value.shape == parameter.shape


def _divisible(size: Size, ranks: int) -> Size:
    shapes = {
        number: (*(-(-length // ranks) * ranks for length in shape[:2]), *shape[2:]) for number, shape in size.shapes.items()
    }
    return Size(shapes, size.steps)


def _shard_functions(mesh: DeviceMesh, dims: Sequence[int | None]) -> list[Cut]:
    """Return for each parameter the function that shards it along a dimension; None keeps it whole."""

    def shard_copy(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        dim = min(dim, tensor.dim() - 1)
        local = tensor.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
        return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)

    return [(lambda tensor: tensor) if dim is None else partial(shard_copy, dim=dim) for dim in dims]
