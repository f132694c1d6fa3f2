"""Reduction of one rank's gradients over replicas and tied stages.

``DDPReplicas`` averages gradients over replicas during the backward pass, with torch's ``DistributedDataParallel``;
``average_gradients`` does so after it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from slapo_core import BuildError


class DDPReplicas:
    """This rank's parameters, whose gradients are averaged over the replicas.

    Each bucket is reduced in the last micro-batch's backward, as soon as it is full. ``DistributedDataParallel`` waits for
    every parameter on every replica. So ``finish`` reduces the parameters that this backward did not reach: unused ones, ones
    that only earlier micro-batches used, and all that remain after an error. ``find_unused_parameters`` stays off: it would
    search the graph in each step, and would not help after an error.

    Buffers are not averaged, e.g. BatchNorm's statistics.

    Args:
        module: Module with at least one trainable parameter.
        group: Process group of the replicas.

    Attributes:
        wrapped: Module that runs ``call(*args, **kwargs)`` when called with ``(*args, call=call, **kwargs)``.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        # the engine has compared the replicas, so DDP sends nothing before the first step
        self.wrapped = DistributedDataParallel(
            _SharedWrapper(module),
            process_group=group,
            init_sync=False,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
        )
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._edges = [get_gradient_edge(parameter) for parameter in self._parameters]
        self._reached: set[int] = set()
        # a hook of the node itself runs after the hook of DDP
        self._hooks = [
            edge.node.register_hook(partial(_mark_reached, weakref.ref(self.wrapped), self._reached, index))
            for index, edge in enumerate(self._edges)
        ]
        self._unused: list[bool] = []

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards accumulate gradients on this rank without reduction."""
        waiting: AbstractContextManager[None] = self.wrapped.no_sync()
        return waiting

    def run(self, call: Callable[..., Any], **inputs: Any) -> Any:
        """Run one forward, whose backward reduces gradients except in ``no_sync``."""
        return self.wrapped(call=call, **inputs)

    def finish(self) -> int:
        """Finish the reduction of a step, on every replica, after its last backward or an error.

        Returns:
            Number of parameters that no micro-batch of this rank used; their gradients count as zero.
        """
        late = [index for index in range(len(self._edges)) if index not in self._reached]
        self._unused = [parameter.grad is None for parameter in self._parameters] if late else []
        if late:
            if not self._reached:  # an error occurred before the last backward
                self.wrapped.reducer.prepare_for_backward([])
            zeros = [torch.zeros_like(self._parameters[index]) for index in late]
            torch.autograd.backward([self._edges[index] for index in late], zeros)
        self._reached.clear()
        return sum(self._unused)

    def clear_unused_gradients(self) -> None:
        """Set the gradients of parameters that no replica used to None, as without replicas. Collective."""
        unused = self._unused or [False] * len(self._parameters)
        idle = torch.tensor(unused, dtype=torch.int32, device=self._parameters[0].device)
        dist.all_reduce(idle, op=dist.ReduceOp.MIN, group=self._group)
        for parameter, nowhere_used in zip(self._parameters, idle.tolist(), strict=True):
            if nowhere_used:
                parameter.grad = None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def check_dense(module: nn.Module) -> None:
    """Raise ``BuildError`` if an embedding has sparse gradients."""
    for path, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise BuildError(f"the sparse gradient of {path!r} cannot be reduced over replicas; build it with sparse=False")


class _SharedWrapper(nn.Module):
    """Module that calls the given function: the plans of all shapes share one DDP wrapper and one set of buckets."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *received: torch.Tensor, call: Callable[..., Any], **inputs: Any) -> Any:
        return call(*received, **inputs)


def _mark_reached(wrapped: weakref.ref[DistributedDataParallel], reached: set[int], index: int, *_: Any) -> None:
    owner = wrapped()
    if owner is not None and owner.require_backward_grad_sync:
        reached.add(index)


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
