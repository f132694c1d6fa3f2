"""Stages for Megatron's pipeline schedules: 1F1B, or interleaved 1F1B with several stages on a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Program
from slapo_training.batches import Batch
from slapo_training.engines import Tie, tied_groups
from slapo_training.label_weights import LabelWeights
from slapo_training.losses import CountedLoss
from slapo_training.stage_forward import StageForward

from .boundary_packing import Layout, carrier_dtype, with_zero_gradient
from .process_state import _megatron_private as private
from .process_state.cpu_mode import without_mode
from .process_state.process_groups import ParallelState


class Borders(NamedTuple):
    """Communication of the values between the stages of one plan.

    ``layouts`` are those of the carrier that each stage receives, ``size`` the largest one's number of elements.
    """

    dtype: torch.dtype
    layouts: tuple[Layout, ...]
    size: int


def borders(program: Program, weights: torch.dtype, device: torch.device) -> Borders:
    """Return the borders of a plan; they are the same on every rank."""
    dtype = carrier_dtype([boundary for stage in program.stages for boundary in stage.inputs], weights)
    layouts = tuple(Layout(stage.inputs, dtype, stage.index - 1, device) for stage in program.stages)
    return Borders(dtype, layouts, max(layout.size for layout in layouts))


class RunningStage(StageForward):
    """Stage that Megatron calls once for each micro-batch, in order.

    Args:
        loss_of: Computes the loss in the last stage.
        before: Earlier stages of this rank. A parameter that they share is reported by the first of them only, because Megatron
            keeps one gradient buffer for each parameter.
    """

    share_embeddings_and_output_weights = False  # ``ties_of`` handles the program's ties

    def __init__(self, program: Program, index: int, loss_of: CountedLoss, config: Any, before: Sequence[RunningStage]) -> None:
        super().__init__(program, index, loss_of)
        self.config, self.model_type = config, private.model_type()
        self.pre_process, self.post_process = index == 0, self.is_last
        self._elsewhere = {id(p) for stage in before for p in stage.stage.parameters()}
        # with several stages on a rank Megatron sends tensors of one size only
        self._is_alone = len(program.stages) == program.axis_size("pp")
        self._borders: Borders | None = None
        self._received: torch.Tensor | None = None

    def begin(self, programs: Sequence[Program], borders: Borders, weights: LabelWeights | None) -> None:
        """Begin a step; all programs share the borders, and without ``weights`` all micro-batches weigh alike in the loss."""
        self._borders = borders
        self._begin(programs, weights)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters that no earlier stage of this rank has."""
        return (each for each in super().named_parameters(*args, **kwargs) if id(each[1]) not in self._elsewhere)

    def sizes(self) -> tuple[int, int]:
        """Return the number of elements that this stage receives, and that it sends."""
        assert self._borders is not None
        layouts = self._borders.layouts
        return layouts[self._index].size, self._borders.size if self.post_process else layouts[self._index + 1].size

    def set_input_tensor(self, tensors: Any) -> None:
        """Store the tensor that the previous stage sent for the next micro-batch; Megatron calls this."""
        (self._received,) = tensors if isinstance(tensors, list) else (tensors,)

    def forward(self, index: int, part: Batch, labels: Any) -> Any:
        """Run one micro-batch, see ``enumerate_micro_batches``; the first stage receives nothing."""
        values: tuple[torch.Tensor, ...] = ()
        if self._index:
            assert self._borders is not None
            assert self._received is not None
            values = self._borders.layouts[self._index].unpack(self._received)
        with without_mode():
            return self._run(index, part, labels, values)

    def output_tensor(self, output: Any) -> torch.Tensor:
        """Return ``forward``'s result as the one tensor that Megatron sends; its backward reaches the received tensor."""
        one: torch.Tensor = output if self.post_process else self._pack_output(output)
        if self._index and torch.is_grad_enabled():
            assert self._received is not None
            one = with_zero_gradient(one, self._received)
        # Megatron divides a loss in place, and may free a tensor after sending it
        is_changed = self.post_process or self.config.deallocate_pipeline_outputs
        return one.clone() if is_changed else one

    def _pack_output(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        assert self._borders is not None
        layout = self._borders.layouts[self._index + 1]
        return layout.pack(values, layout.size if self._is_alone else self._borders.size)


def ties_of(program: Program, state: ParallelState) -> list[Tie]:
    """Return this rank's parameters that are tied to other ranks' stages; ``state`` destroys the new groups. Collective."""
    ends = (0, program.axis_size("pp") - 1) if state.is_ours else ()  # the user's embedding group may differ
    # reuse Megatron's group of the first and the last stage; all ranks take the same branch
    ties = tied_groups(program, lambda places, ranks: state.groups.embd if places == ends else state.group(ranks))
    for tie in ties:
        private.mark_tie(tie.parameter, is_first=dist.get_rank() == tie.first)
    return ties
