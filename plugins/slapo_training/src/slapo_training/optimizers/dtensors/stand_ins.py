"""Stand-ins of one group of ranks that each rank steps in place: DTensors over its own shards, of which nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ...distributed._torch_private import set_local
from ...gradient_hooks.sharded_attributes import is_shaped_like
from ...model.pieces import Piece
from ..whole_tensors.owner_exchange import LocalBox
from ..whole_tensors.whole_tensor import WholeTensor, local_of, stand_in

Tensors = Callable[[], Sequence[torch.Tensor]]


class DTensorStandIns:
    """Sharded parameters that an optimizer steps in the places of the rank's shards, and which share memory with these.

    It has the interface of ``StandIns``. Every rank steps all parameters, and DTensor reduces the statistics of each.

    Args:
        wholes: The same on every rank of the group, in the order of the model.
        dims: The dimension along which the ranks hold equal shards of each, in the order of their ranks.
        group: The ranks that hold them.

    Attributes:
        wholes: As given.
        parameters: The stand-in of each.
        is_everywhere: Whether a step depends on all of them.
        is_in_place: Whether ranks step shards in place.
    """

    is_everywhere, is_in_place = False, True

    def __init__(self, wholes: Sequence[WholeTensor], dims: Sequence[int], group: dist.ProcessGroup) -> None:
        self.wholes, self._dims, self._group = list(wholes), list(dims), group
        self.mesh = mesh_over(group, self.wholes[0].source.device)
        self._tensors: Tensors | None = None
        self._holdings: list[LocalBox] = []
        self._labels: Sequence[int] = ()
        self.parameters: list[nn.Parameter] = []

    def keep(self, known: Container[int]) -> bool:
        """Leave out stand-ins that no optimizer has, and return whether there were some; it is bound anew then.

        Args:
            known: Ids of those that one has.
        """
        kept = [number for number, parameter in enumerate(self.parameters) if id(parameter) in known]
        if len(kept) == len(self.wholes):
            return False
        self.wholes, self._dims = [self.wholes[number] for number in kept], [self._dims[number] for number in kept]
        self.parameters = [self.parameters[number] for number in kept]
        return True

    def bind(self, tensors: Tensors, holdings: Sequence[LocalBox], labels: Sequence[int] | None = None) -> None:
        """Set the tensors in which this rank has values and gradients from now on.

        Args:
            tensors: Gives the rank's tensors, each with its gradient.
            holdings: The shard of each stand-in in these.
            labels: A number for each stand-in; an engine may step those of one number at a time.
        """
        self._tensors, self._labels = tensors, labels or [0] * len(self.wholes)
        self._holdings = sorted(holdings, key=lambda holding: holding.whole)
        assert [holding.whole for holding in self._holdings] == list(range(len(self.wholes)))

    def move(self, value_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Set other tensors of the same layout that have the rank's values from now on."""
        before = self._tensors
        assert before is not None
        self._tensors = lambda: [value_of(each) for each in before()]

    def make(self) -> None:
        """Make the stand-ins."""
        for whole, dim, local in zip(self.wholes, self._dims, self._locals(), strict=True):
            value = DTensor.from_local(local, self.mesh, [Shard(dim)], run_check=False)
            self.parameters.append(stand_in(whole, value, {}))

    def owned(self, labels: Container[int] | None = None) -> list[nn.Parameter]:
        """Return the stand-ins of some labels; all where none are given."""
        return [self.parameters[number] for number in self._meant(labels)]

    @torch.no_grad()
    def fetch_all(self, labels: Container[int] | None) -> None:
        """Let the stand-ins of some labels have the rank's values and gradients as they are now. Collective."""
        values = self._values()
        gradients = [values[holding.place].grad for holding in self._holdings]
        known = self._has_gradient(gradients)
        locals_ = self._locals()
        for number in self._meant(labels):
            parameter, local, gradient = self.parameters[number], locals_[number], gradients[number]
            set_local(parameter, local)
            parameter.grad = None
            if known[number]:
                own = torch.zeros_like(local) if gradient is None else self._own(number, gradient)
                parameter.grad = DTensor.from_local(own, self.mesh, [Shard(self._dims[number])], run_check=False)

    @torch.no_grad()
    def put(self, labels: Container[int] | None = None) -> None:
        """Copy new values to the rank's tensors where these are of another type than the stand-ins."""
        values = self._values()
        for number in self._meant(labels):
            holding, local = self._holdings[number], local_of(self.parameters[number].detach())
            value = holding.of(values[holding.place].detach())
            if value.data_ptr() != local.data_ptr():
                value.copy_(local)

    def release(self) -> None:
        """Let go of the gradients; the values are the rank's own."""
        for parameter in self.parameters:
            parameter.grad = None

    def _meant(self, labels: Container[int] | None) -> list[int]:
        return [number for number in range(len(self.wholes)) if labels is None or self._labels[number] in labels]

    def _values(self) -> list[torch.Tensor]:
        assert self._tensors is not None
        return list(self._tensors())

    def _locals(self) -> list[torch.Tensor]:
        values = self._values()
        return [self._own(number, values[holding.place].detach()) for number, holding in enumerate(self._holdings)]

    def _own(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shard in the rank's tensor or its gradient, a view unless it is of another type."""
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        return self._holdings[number].of(dense).to(self.wholes[number].source.device, self.wholes[number].dtype)

    def _has_gradient(self, gradients: Sequence[torch.Tensor | None]) -> list[bool]:
        """Return whether some rank has a gradient of each: all are to reduce the same statistics. Collective."""
        flags = torch.tensor([int(each is not None) for each in gradients], dtype=torch.int32)
        flags = flags.to(self.wholes[0].source.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in flags.tolist()]


def mesh_over(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """Return the mesh of one axis over a group."""
    # DTensor's caches take meshes of the same ranks and names for one, whose group may be gone
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(f"shards_{group.group_name}",))


def even_dim(whole: WholeTensor, piece: Piece, group: dist.ProcessGroup) -> int | None:
    """Return the dimension along which this rank's part is the equal share of its rank; None where it is anything else.

    Args:
        whole: The whole tensor.
        piece: What the rank holds of it.
        group: The ranks that hold it.
    """
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
