"""Sums of gradients of tied parameters over pipeline ranks, and means of gradients over replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce

import torch
import torch.distributed as dist

BUCKET_BYTES = 25 * 2**20
"""Largest message in bytes; several messages overlap."""

Bucket = list[torch.nn.Parameter]


def sum_gradients(ties: Mapping[tuple[int, ...], Bucket], pipeline: dist.ProcessGroup) -> None:
    """Sum gradients of tied parameters over the ranks that share them. Collective over these ranks only.

    Each rank sends its gradients to the others and adds all in rank order, so that sums are equal bit by bit. A process group
    of these ranks would have to be made on all ranks of the world, some of which may not train this model.

    Args:
        ties: This rank's tied parameters, with dense gradients, by the ranks that share them; both orders are equal on all
            ranks. A missing gradient counts as zero; it stays None if it is missing on all these ranks.
        pipeline: Process group of all stages.
    """
    own, sums, messages = dist.get_rank(pipeline), [], []
    for ranks, parameters in ties.items():
        for bucket in _buckets(parameters):
            mine = _flatten_gradients(bucket)
            flats = {rank: mine if rank == own else torch.empty_like(mine) for rank in ranks}
            sums.append((bucket, list(flats.values())))
            for rank in ranks:
                if rank != own:
                    peer = dist.get_global_rank(pipeline, rank)
                    messages.append(dist.P2POp(dist.isend, mine, peer, pipeline))
                    messages.append(dist.P2POp(dist.irecv, flats[rank], peer, pipeline))
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    for bucket, found in sums:
        _write_gradients(bucket, reduce(torch.add, found))


def average_gradients(parameters: Iterable[torch.nn.Parameter], replicas: dist.ProcessGroup) -> None:
    """Average dense gradients over replicas. Collective over ``replicas``.

    The parameters have the same order on all replicas. A missing gradient counts as zero; it stays None if it is missing on
    all replicas.
    """
    reduced = []
    for bucket in _buckets(parameters):
        flat = _flatten_gradients(bucket)
        reduced.append((bucket, flat, dist.all_reduce(flat, group=replicas, async_op=True)))
    for bucket, flat, work in reduced:
        work.wait()
        _write_gradients(bucket, flat, 1 / replicas.size())


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterator[Bucket]:
    open_buckets: dict[torch.dtype, Bucket] = defaultdict(list)
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for parameter in parameters:
        dtype = parameter.dtype
        open_buckets[dtype].append(parameter)
        sizes[dtype] += parameter.numel() * parameter.element_size()
        if sizes[dtype] >= BUCKET_BYTES:
            yield open_buckets.pop(dtype)
            sizes[dtype] = 0
    yield from open_buckets.values()


def _flatten_gradients(bucket: Bucket) -> torch.Tensor:
    """Return one flat tensor of the gradients, followed by one number per parameter: 1 if it has a gradient."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    present = torch.tensor([p.grad is not None for p in bucket], dtype=bucket[0].dtype, device=bucket[0].device)
    flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), present])
    return torch.view_as_real(flat) if flat.is_complex() else flat


def _write_gradients(bucket: Bucket, flat: torch.Tensor, scale: float = 1.0) -> None:
    sizes = [parameter.numel() for parameter in bucket]
    flat = torch.view_as_complex(flat) if bucket[0].is_complex() else flat
    *pieces, present = torch.split(flat, [*sizes, len(bucket)])
    for parameter, piece, holders in zip(bucket, pieces, present.tolist(), strict=True):
        if holders:
            gradient = piece.view_as(parameter) if scale == 1.0 else piece.view_as(parameter) * scale
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)
