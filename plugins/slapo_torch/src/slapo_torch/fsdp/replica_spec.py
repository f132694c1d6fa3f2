"""How a parameter is cut that FSDP2 shards over the replicas, on top of what tensor parallelism cut already.

The ranks keep plain local tensors with this spec, and all that gathers, counts or loads parameters by their spec works on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, ShardSpec, parameter_facts, shard_spec


@dataclass(frozen=True)
class ReplicaSpec(ShardSpec):
    """Rows of a replica's parameter on one rank, split as ``torch.chunk`` splits; the last ranks may have fewer rows or none.

    ``rank``, ``num_shards`` and ``group`` are those of all ranks that together hold the full tensor.

    Args:
        inner: How the replica's tensor is cut from the full one, as it was before; None for a whole one.
        replicas: The ranks that share the replica's tensor.
    """

    inner: ShardSpec | None = None
    replicas: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, parameter: torch.Tensor, replicas: dist.ProcessGroup, everyone: dist.ProcessGroup | None) -> ReplicaSpec:
        """The spec of this rank's rows of a replica's parameter.

        Args:
            parameter: Before it is sharded over replicas.
            replicas: The data-parallel ranks.
            everyone: The data-parallel and tensor-parallel ranks, row-major.
        """
        inner = shard_spec(parameter)
        rank, size, shape = replicas.rank(), replicas.size(), tuple(parameter.shape)
        if inner is not None and inner.num_shards > 1:
            shape, rank = inner.full_shape, rank * inner.num_shards + inner.rank
            size *= inner.num_shards
            group = everyone
        else:
            group = replicas
        return cls(0, shape, rank, size, (shape[0],), group, "dp", None, inner, replicas)

    @property
    def parts(self) -> int:
        """Into how many parts the full tensor was cut before."""
        return self.inner.num_shards if self.inner is not None else 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of rows of each rank."""
        return tuple(stop - start for start, stop in map(self.rows, range(self.num_shards)))

    def replica_rows(self, rank: int | None = None) -> int:
        """Return the number of the tensor's rows in the replica of a rank (default: this one)."""
        part = (self.rank if rank is None else rank) % self.parts
        return self.inner.sizes[part] if self.inner is not None and self.inner.dim == 0 else self.full_shape[0]

    def rows(self, rank: int | None = None) -> tuple[int, int]:
        """Return the first of a rank's rows, and the one behind the last."""
        rank = self.rank if rank is None else rank
        rows, replicas = self.replica_rows(rank), self.num_shards // self.parts
        step = -(-rows // replicas)
        start = min(rank // self.parts * step, rows)
        return start, min(start + step, rows)

    def ranges(self, rank: int | None = None) -> list[tuple[int, int]]:
        """The ranges of the full tensor along ``dim`` that a rank holds."""
        if self.parts > 1:
            raise BuildError("rows of a tensor-parallel part are no ranges of the full tensor; use local() and assemble()")
        return [self.rows(rank)]

    def counted(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the part of this rank's shard that counts where every element of the full tensor counts once."""
        if self.inner is None or self.inner.dealt is None:
            return shard
        if self.inner.dim:
            return self.inner.counted(shard)
        start, stop = self.rows()
        kept = self.inner.counted(torch.arange(self.replica_rows()))
        kept = kept[(kept >= start) & (kept < stop)] - start
        return shard if len(kept) == stop - start else shard.index_select(0, kept.to(shard.device))

    def local(self, full: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Cut the shard of ``rank`` out of ``full``: a new contiguous tensor."""
        rank = self.rank if rank is None else rank
        if self.parts > 1:
            assert self.inner is not None
            full = self.inner.local(full, rank % self.parts)
        return self.cut(full, rank)

    def cut(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """The rows of a rank out of its replica's tensor: a new contiguous tensor."""
        start, stop = self.rows(rank)
        return whole.narrow(0, start, stop - start).clone(memory_format=torch.contiguous_format)

    def assemble(self, shards: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """Put the shards of all ranks, in rank order, together to the full tensor; what is behind a shard's size is ignored."""
        kept = [shard.narrow(0, 0, size) for shard, size in zip(shards, self.sizes, strict=True)]
        parts = [torch.cat(kept[part :: self.parts]) for part in range(self.parts)]
        return self.inner.assemble(parts) if self.inner is not None and self.parts > 1 else parts[0]


def replica_spec(tensor: torch.Tensor) -> ReplicaSpec | None:
    """Return the sharding of a parameter over replicas; None for what each has for itself."""
    spec = shard_spec(tensor)
    return spec if isinstance(spec, ReplicaSpec) else None


def replica_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of its shape in its replica; a tensor that is not sharded over replicas as it is."""
    spec = replica_spec(tensor)
    if spec is None:
        return tensor
    meta = torch.empty((spec.replica_rows(), *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
    parameter_facts(meta).names, parameter_facts(meta).spec = parameter_facts(tensor).names, spec.inner
    return meta


def without_replica_sharding(parameter: nn.Parameter) -> nn.Parameter:
    """The same values and gradient with what was known of the parameter before it was sharded over replicas."""
    spec = replica_spec(parameter)
    if spec is None:
        return parameter
    seen = nn.Parameter(parameter.detach(), requires_grad=False)
    parameter_facts(seen).names, parameter_facts(seen).spec = parameter_facts(parameter).names, spec.inner
    seen.grad = parameter.grad
    return seen
