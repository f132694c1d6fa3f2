"""Gradients averaged over the data-parallel axis, by torch's ``DistributedDataParallel``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from slapo_core import BuildError


class DDPReplicas:
    """This rank's parameters and their copies on the other replicas.

    Each bucket is reduced during the last micro-batch's backward, as soon as it is full. ``DistributedDataParallel`` waits for
    every parameter on every replica, so ``finish`` brings in those that this backward did not reach: unused ones, ones that
    only earlier micro-batches used, and after an error all that are left. ``find_unused_parameters`` stays off: it would search
    the graph in each step, and would not help after an error.

    Buffers are each replica's own, as without replicas: BatchNorm's statistics are not averaged.

    Args:
        module: What holds the parameters; it has at least one that is trainable.
        group: The replicas.

    Attributes:
        wrapped: Runs ``call(*args, **kwargs)`` when called with ``(*args, call=call, **kwargs)``.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        # the engine has compared the replicas: nothing is sent before the first step
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
        # hooks of the node itself run after the wrapper's own
        self._hooks = [
            edge.node.register_hook(partial(_mark_reached, weakref.ref(self.wrapped), self._reached, index))
            for index, edge in enumerate(self._edges)
        ]
        self._unused: list[bool] = []

    def no_sync(self) -> AbstractContextManager[None]:
        """Forward and backward inside of this keep their gradients on this rank."""
        waiting: AbstractContextManager[None] = self.wrapped.no_sync()
        return waiting

    def run(self, call: Callable[..., Any], **inputs: Any) -> Any:
        """One forward whose gradients are reduced in its backward, unless ``no_sync``."""
        return self.wrapped(call=call, **inputs)

    def finish(self) -> int:
        """End a step's reduction, on every replica after its last backward or an error; gradients are then the means.

        Returns:
            How many parameters no micro-batch of this rank used; they count as zero.
        """
        late = [index for index in range(len(self._edges)) if index not in self._reached]
        self._unused = [parameter.grad is None for parameter in self._parameters] if late else []
        if late:
            if not self._reached:  # an error may have come before the last backward
                self.wrapped.reducer.prepare_for_backward([])
            zeros = [torch.zeros_like(self._parameters[index]) for index in late]
            torch.autograd.backward([self._edges[index] for index in late], zeros)
        self._reached.clear()
        return sum(self._unused)

    def clear_unused_gradients(self) -> None:
        """Let parameters that no replica used in this step have no gradient, as without replicas. Collective."""
        unused = self._unused or [False] * len(self._parameters)
        idle = torch.tensor(unused, dtype=torch.int32, device=self._parameters[0].device)
        dist.all_reduce(idle, op=dist.ReduceOp.MIN, group=self._group)
        for parameter, nowhere_used in zip(self._parameters, idle.tolist(), strict=True):
            if nowhere_used:
                parameter.grad = None

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def check_dense(module: nn.Module) -> None:
    """Raise ``BuildError`` where an embedding gives sparse gradients."""
    for path, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise BuildError(f"the sparse gradient of {path!r} cannot be reduced over replicas; build it with sparse=False")


class _SharedWrapper(nn.Module):
    """Lets the plans of all shapes share one wrapper, and so one set of buckets."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *received: torch.Tensor, call: Callable[..., Any], **inputs: Any) -> Any:
        return call(*received, **inputs)


def _mark_reached(wrapped: weakref.ref[DistributedDataParallel], reached: set[int], index: int, *_: Any) -> None:
    owner = wrapped()
    if owner is not None and owner.require_backward_grad_sync:
        reached.add(index)
