"""Shard specs of parameters that FSDP2 shards over the replicas, on top of tensor parallelism.

Ranks keep plain local tensors with this spec. So code that gathers, counts or loads parameters by their spec needs no change.
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
        inner: Spec of the replica's tensor within the full tensor; None if the replica has the full tensor.
        replicas: Process group of the ranks that share the replica's tensor.
    """

    inner: ShardSpec | None = None
    replicas: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, parameter: torch.Tensor, replicas: dist.ProcessGroup, everyone: dist.ProcessGroup | None) -> ReplicaSpec:
        """Return the spec of this rank's rows of a replica's parameter, before it is sharded over ``replicas``.

        ``everyone`` are the data-parallel and tensor-parallel ranks, row-major; None without the latter.
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
        """Number of tensor-parallel shards of the full tensor."""
        return self.inner.num_shards if self.inner is not None else 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in map(self.rows, range(self.num_shards)))

    def replica_rows(self, rank: int | None = None) -> int:
        """Return the number of the tensor's rows in the replica of a rank (default: this one)."""
        part = (self.rank if rank is None else rank) % self.parts
        return self.inner.sizes[part] if self.inner is not None and self.inner.dim == 0 else self.full_shape[0]

    def rows(self, rank: int | None = None) -> tuple[int, int]:
        """Return the first row of a rank, and the row after its last one."""
        rank = self.rank if rank is None else rank
        rows, replicas = self.replica_rows(rank), self.num_shards // self.parts
        step = -(-rows // replicas)
        start = min(rank // self.parts * step, rows)
        return start, min(start + step, rows)

    def ranges(self, rank: int | None = None) -> list[tuple[int, int]]:
        if self.parts > 1:
            raise BuildError(
                "rows of a tensor-parallel part are not contiguous ranges of the full tensor; use local() and assemble()"
            )
        return [self.rows(rank)]

    def without_copies(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the part of this rank's shard to count, so that each element of the full tensor counts on one rank."""
        if self.inner is None or self.inner.uneven_ranges is None:
            return shard
        if self.inner.dim:
            return self.inner.without_copies(shard)
        start, stop = self.rows()
        kept = self.inner.without_copies(torch.arange(self.replica_rows()))
        kept = kept[(kept >= start) & (kept < stop)] - start
        return shard if len(kept) == stop - start else shard.index_select(0, kept.to(shard.device))

    def local(self, full: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        rank = self.rank if rank is None else rank
        if self.parts > 1:
            assert self.inner is not None
            full = self.inner.local(full, rank % self.parts)
        return self.cut(full, rank)

    def cut(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Return a rank's rows of its replica's tensor: a new contiguous tensor."""
        start, stop = self.rows(rank)
        return whole.narrow(0, start, stop - start).clone(memory_format=torch.contiguous_format)

    def assemble(self, shards: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """Assemble the full tensor from the shards of all ranks in rank order; padding rows are ignored."""
        kept = [shard.narrow(0, 0, size) for shard, size in zip(shards, self.sizes, strict=True)]
        parts = [torch.cat(kept[part :: self.parts]) for part in range(self.parts)]
        return self.inner.assemble(parts) if self.inner is not None and self.parts > 1 else parts[0]


def replica_spec(tensor: torch.Tensor) -> ReplicaSpec | None:
    """Return the spec of a parameter that is sharded over replicas, or None."""
    spec = shard_spec(tensor)
    return spec if isinstance(spec, ReplicaSpec) else None


def replica_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the shape and facts of the replica's tensor; or ``tensor`` if FSDP has not sharded it."""
    spec = replica_spec(tensor)
    if spec is None:
        return tensor
    meta = torch.empty((spec.replica_rows(), *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
    parameter_facts(meta).names, parameter_facts(meta).spec = parameter_facts(tensor).names, spec.inner
    return meta


def without_replica_sharding(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter with the same values, the same gradient, and the facts from before FSDP sharded it."""
    spec = replica_spec(parameter)
    if spec is None:
        return parameter
    seen = nn.Parameter(parameter.detach(), requires_grad=False)
    parameter_facts(seen).names, parameter_facts(seen).spec = parameter_facts(parameter).names, spec.inner
    seen.grad = parameter.grad
    return seen
