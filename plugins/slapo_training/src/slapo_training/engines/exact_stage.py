"""Stage for the schedules of ``torch.distributed.pipelining``, whose gradients are those of the unmodified model.

Beyond that package's documentation, this module relies on two facts: schedules call ``forward_one_chunk``,
``backward_one_chunk`` and ``backward_weight_one_chunk`` of their stages, and ``clear_runtime_states`` as a step
begins; and stages have the attributes ``submod``, ``has_backward``, ``fwd_cache``, ``bwd_cache``,
``backward_state`` and ``dw_runner``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from .gradient_unaliasing import GradientUnaliasing, MemoryExtent, memory_extents
from .split_backward import can_split_backward, note_tensor_hooks


class ExactStage(PipelineStage):
    """Pipeline stage with exact gradients under each schedule of torch, for any module.

    torch splits a backward in two without looking at its graph, and lets gradients share memory that later micro-batches
    accumulate into. This stage runs all of a backward in the first part where a split would lose or double a gradient. It
    copies gradients that share memory, and sends contiguous gradients.

    Args:
        *args: Arguments of ``PipelineStage``.
        **kwargs: Keyword arguments of ``PipelineStage``.
    """

    trained: nn.Module
    """Module with the parameters whose gradients are accumulated; by default the stage's own."""
    splits = True
    """False if the schedule never splits a backward, so that forwards need not note hooks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trained = self.submod
        self._hooked: set[int] = set()
        self._unsplit: set[int] = set()
        self._unaliasing: GradientUnaliasing | None = None
        self._sent: dict[int, list[MemoryExtent]] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one micro-batch."""
        with note_tensor_hooks(lambda: self._hooked.add(fwd_chunk_id)) if self.splits else nullcontext():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of one micro-batch, or its first part: gradients of the stage's inputs."""
        if not self.has_backward:
            return
        if self._unaliasing is None:
            self._unaliasing = GradientUnaliasing(self.trained)
        runs_all = full_backward or not self._can_split(bwd_chunk_id, loss)
        if runs_all and not full_backward:
            self._unsplit.add(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, runs_all, last_backward)
        # input gradients were not accumulated in a leaf, so they may have any strides; messages are contiguous
        gradients = self.bwd_cache[bwd_chunk_id]
        self.bwd_cache[bwd_chunk_id] = tuple(value if value is None else value.contiguous() for value in gradients)
        self._sent[bwd_chunk_id] = memory_extents(self.bwd_cache[bwd_chunk_id])
        if runs_all:
            self._separate(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the second part of a backward: gradients of the stage's parameters; nothing if the first part ran all."""
        if self.has_backward and bwd_chunk_id not in self._unsplit:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self._separate(bwd_chunk_id)

    def clear_runtime_states(self) -> None:
        """Clear the state of an earlier step, which may have failed."""
        super().clear_runtime_states()
        for state in (self._hooked, self._unsplit, self._sent, self.backward_state, self.dw_runner):
            state.clear()
        self._unaliasing = None

    def _separate(self, microbatch: int) -> None:
        """Copy gradients that share memory, after a backward; input gradients may still be waiting to be sent."""
        assert self._unaliasing is not None
        self._unaliasing.separate(self._sent.pop(microbatch))

    def _can_split(self, microbatch: int, loss: Any) -> bool:
        """Return True if a micro-batch's backward can be split; the first stage runs all of it in the second part."""
        if self.is_first:
            return True
        if microbatch in self._hooked:
            return False
        given, received = self.fwd_cache[microbatch]
        if not self.is_last:  # the runtime calls detach_() on outputs, which views refuse
            given = tuple(output.clone() if output._is_view() else output for output in given)
            self.fwd_cache[microbatch] = (given, received)
        return can_split_backward(
            (loss,) if self.is_last else given, [each for each in received if isinstance(each, torch.Tensor)]
        )
