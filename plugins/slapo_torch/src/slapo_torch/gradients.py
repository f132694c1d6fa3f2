"""Gradients of tied parameters: the sum over the stages that share one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from slapo_core.errors import BuildError

BUCKET_BYTES = 25 * 2**20
"""Largest message; reduces of several buckets are under way at the same time."""

Bucket = list[torch.nn.Parameter]


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum gradients over a group; collective.

    Args:
        parameters: The same ones in the same order on every rank of the group. One without a gradient counts as zero, and
            keeps None where no rank has one.
        group: The ranks to sum over.
    """
    pending = [(bucket, *_start(bucket, group)) for bucket in _buckets(parameters)]
    for bucket, flat, work in pending:
        work.wait()
        _finish(bucket, flat)


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterator[Bucket]:
    open_buckets: dict[torch.dtype, Bucket] = defaultdict(list)
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise BuildError("a sparse gradient cannot be reduced over ranks; build the embedding with sparse=False")
        dtype = parameter.dtype
        open_buckets[dtype].append(parameter)
        sizes[dtype] += parameter.numel() * parameter.element_size()
        if sizes[dtype] >= BUCKET_BYTES:
            yield open_buckets.pop(dtype)
            sizes[dtype] = 0
    yield from open_buckets.values()


def _start(bucket: Bucket, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    # one number per parameter at the end counts the ranks that have a gradient
    present = torch.tensor([p.grad is not None for p in bucket], dtype=bucket[0].dtype, device=bucket[0].device)
    flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), present])
    work = dist.all_reduce(flat, group=group, async_op=True)
    assert work is not None
    return flat, work


def _finish(bucket: Bucket, flat: torch.Tensor) -> None:
    sizes = [parameter.numel() for parameter in bucket]
    *pieces, present = torch.split(flat, [*sizes, len(bucket)])
    for parameter, piece, ranks in zip(bucket, pieces, present.tolist(), strict=True):
        if ranks > 0:
            if parameter.grad is None:
                parameter.grad = piece.view_as(parameter).clone()
            else:
                parameter.grad.copy_(piece.view_as(parameter))


def by_stages(ties: Sequence[tuple[tuple[int, ...], torch.nn.Parameter]]) -> dict[tuple[int, ...], Bucket]:
    """Tied parameters by the stages that share them, both in an order that is the same on every rank."""
    groups: dict[tuple[int, ...], Bucket] = defaultdict(list)
    for stages, parameter in ties:
        groups[stages].append(parameter)
    return dict(sorted(groups.items()))
