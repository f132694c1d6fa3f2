"""Stand-ins of one process group that each rank steps in place: DTensors over its shards, without a gather."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ...distributed._torch_private import set_local
from ...gradient_hooks.sharded_attributes import is_shaped_like
from ...model.pieces import Piece
from ..whole_tensors.owner_exchange import LocalBox
from ..whole_tensors.stand_ins import StandIns, Tensors
from ..whole_tensors.whole_tensor import WholeTensor, local_of, stand_in


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
