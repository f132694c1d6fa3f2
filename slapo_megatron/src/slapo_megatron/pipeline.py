"""Stages in Megatron's forward and backward functions: 1F1B, and with several stages on a rank interleaved 1F1B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from slapo_core.interfaces.program import Program, Stage
from slapo_core.modules.forward_arguments import by_position
from slapo_training.batches.microbatches import Batch
from slapo_training.engines.stage_parameters import copies
from slapo_training.label_weights import LabelWeights
from slapo_training.losses.microbatch_loss import CountedLoss, check_has_gradient, run_stage
from slapo_training.losses.reductions import LossReduction

from .boundary_packing import Layout, carrier_dtype, reached
from .process_state import _megatron_private as private
from .process_state.cpu_mode import without_mode
from .process_state.process_groups import ParallelState


class Borders(NamedTuple):
    """Communication of the values between the stages of one plan.

    Args:
        dtype: Of every carrier.
        layouts: For each stage what it receives.
        size: Elements of the largest carrier.
    """

    dtype: torch.dtype
    layouts: tuple[Layout, ...]
    size: int


def borders(program: Program, weights: torch.dtype, device: torch.device) -> Borders:
    """Those of a plan; the same on every rank."""
    dtype = carrier_dtype([boundary for stage in program.stages for boundary in stage.inputs], weights)
    layouts = tuple(Layout(stage.inputs, dtype, stage.index - 1, device) for stage in program.stages)
    return Borders(dtype, layouts, max(layout.size for layout in layouts))


class RunningStage(nn.Module):
    """A stage as Megatron calls it, once for each micro-batch in order.

    Args:
        program: In stages.
        index: Which of them.
        loss_of: Computes the loss in the last stage.
        config: Megatron's ``TransformerConfig``.
        before: The stages of this rank before it. What these hold, too, Megatron finds in them alone: it keeps each parameter
            and its gradient in one place.
    """

    share_embeddings_and_output_weights = False  # ties are those of the program, see ``Ties``

    def __init__(self, program: Program, index: int, loss_of: CountedLoss, config: Any, before: Sequence[RunningStage]) -> None:
        super().__init__()
        self.config, self.model_type = config, private.model_type()
        self.pre_process, self.post_process = index == 0, index == len(program.stages) - 1
        self.stage = program.stages[index].module
        self._index, self._elsewhere = index, {id(p) for stage in before for p in stage.stage.parameters()}
        # with several stages on a rank Megatron sends tensors of one size only
        self._is_alone = len(program.stages) == program.axis_size("pp")
        self._loss_of = loss_of
        self._borders: Borders | None = None
        self._planned: list[Stage] = []
        self._is_whole = False
        self._names: tuple[str, ...] | None = None
        self._weights: LabelWeights | None = None
        self._received: torch.Tensor | None = None
        self.counted: list[LossReduction] = []

    def begin(self, programs: Sequence[Program], borders: Borders, weights: LabelWeights | None) -> None:
        """Begin a step.

        Args:
            programs: One for each micro-batch.
            borders: Those of all of them.
            weights: What each micro-batch weighs in the loss; None for all alike.
        """
        self._planned = [each.stages[self._index] for each in programs]
        self._is_whole = len(programs[0].stages) == 1
        self._borders, self._weights, self.counted = borders, weights, []
        self._select(0)

    def _select(self, microbatch: int) -> None:
        stage = self._planned[microbatch]
        self._modules["stage"], self._names = stage.module, None if self._is_whole else stage.batch_inputs

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that no stage before it on this rank has."""
        return (each for each in super().named_parameters(*args, **kwargs) if id(each[1]) not in self._elsewhere)

    def sizes(self) -> tuple[int, int]:
        """Elements of what this stage receives and of what it gives."""
        assert self._borders is not None
        layouts = self._borders.layouts
        return layouts[self._index].size, self._borders.size if self.post_process else layouts[self._index + 1].size

    def set_input_tensor(self, tensors: Any) -> None:
        """Take what the stage before sent for the next micro-batch; Megatron calls this."""
        (self._received,) = tensors if isinstance(tensors, list) else (tensors,)

    def forward(self, index: int, part: Batch, labels: Any) -> Any:
        """Run one micro-batch.

        Args:
            index: Its number.
            part: The model's arguments.
            labels: For the loss function.

        Returns:
            Its loss, in the last stage; in others the values that the next stage receives.
        """
        self._select(index)
        batch = part if self._names is None else {name: part[name] for name in self._names if name in part}
        values: tuple[torch.Tensor, ...] = ()
        if self._index:
            assert self._borders is not None
            assert self._received is not None
            values = self._borders.layouts[self._index].unpack(self._received)
        with without_mode():
            if not self.post_process:
                return run_stage(labels, lambda: self.stage(*values, **batch), self._index)
            args, kwargs = by_position(self.stage, batch) if self._names is None else (values, batch)
            loss, counted = self._loss_of(lambda: self.stage(*args, **kwargs), labels, self._index)
        check_has_gradient(loss)
        self.counted.append(counted)
        return loss if self._weights is None else self._weights.weighted(index, loss, counted)

    def sent(self, output: Any) -> torch.Tensor:
        """Return what Megatron gets of ``forward``'s result: one tensor, whose backward reaches what this stage received."""
        one: torch.Tensor = output if self.post_process else self._packed(output)
        if self._index and torch.is_grad_enabled():
            assert self._received is not None
            one = reached(one, self._received)
        # Megatron divides a loss in place, and may free what it has sent
        is_changed = self.post_process or self.config.deallocate_pipeline_outputs
        return one.clone() if is_changed else one

    def _packed(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        assert self._borders is not None
        layout = self._borders.layouts[self._index + 1]
        return layout.pack(values, layout.size if self._is_alone else self._borders.size)


class Ties:
    """This rank's parameters that other stages' ranks have too, each with the group of these ranks. Collective.

    Args:
        program: In stages.
        state: Megatron's groups, which ends those that are made here.
    """

    def __init__(self, program: Program, state: ParallelState) -> None:
        self._groups: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        ends = (0, program.axis_size("pp") - 1) if state.is_ours else ()  # a user's embedding group may have other ranks
        for parameter, places, ranks in copies(program):
            # Megatron has one of the ends already, whose ranks are the same on all
            group = state.groups.embd if places == ends else state.group(ranks)
            if dist.get_rank() in ranks:
                private.mark_tie(parameter, is_first=dist.get_rank() == ranks[0])
                self._groups.append((parameter, group))

    def close(self) -> None:
        """Forget them."""
        self._groups.clear()

    def reduce(self) -> None:
        """Sum the gradients of the copies."""
        for parameter, group in self._groups:
            if parameter.requires_grad:
                dist.all_reduce(private.main_grad(parameter), group=group)


def numbered(parts: Sequence[Batch], labels: Sequence[Any]) -> Iterator[tuple[int, Batch, Any]]:
    """Iterate over what Megatron hands to a stage's forward step, micro-batch by micro-batch."""
    return iter([*zip(range(len(parts)), parts, labels, strict=True)])
