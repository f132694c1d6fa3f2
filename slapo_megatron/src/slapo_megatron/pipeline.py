"""Stages for Megatron's pipeline schedules: 1F1B, or interleaved 1F1B with several stages on a rank.

The outputs of a stage are packed into one tensor, the only one that Megatron sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Boundary, BuildError, Program, Stage
from slapo_training.batches import Batch
from slapo_training.engines import Tie, tied_groups
from slapo_training.label_weights import LabelWeights
from slapo_training.losses import CountedLoss
from slapo_training.stage_forward import StageForward

from .process_state import _megatron_private as private
from .process_state.cpu_mode import without_mode
from .process_state.process_groups import ParallelState


class Layout:
    """Layout of one boundary's values in the carrier, the one tensor that Megatron sends and whose gradient comes back.

    All ranks know the plan, so that it is not sent. Values with a gradient come first, then the bits of all others.

    Args:
        stage: Index of the stage that returns the values, for errors.
        device: Device that this rank sends from.
    """

    def __init__(self, planned: Sequence[Boundary], dtype: torch.dtype, stage: int, device: torch.device) -> None:
        self._planned, self._dtype, self._stage, self._device = tuple(planned), dtype, stage, device
        self._with_gradient = [index for index, boundary in enumerate(planned) if boundary.requires_grad]
        self._without = [index for index, boundary in enumerate(planned) if not boundary.requires_grad]
        self._sizes = [self._elements(planned[index]) for index in (*self._with_gradient, *self._without)]
        self.size = max(1, sum(self._sizes))

    def _elements(self, boundary: Boundary) -> int:
        """Return the number of carrier elements for one value."""
        number = prod(boundary.shape)
        if boundary.requires_grad:
            return number * (2 if boundary.dtype.is_complex else 1)
        return -(-number * boundary.dtype.itemsize // self._dtype.itemsize)

    def pack(self, values: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        """Pack the outputs of a stage, in the order of the plan, into a tensor of ``size`` elements, at least the layout's.

        Raises:
            BuildError: a value has another shape or type than planned, or its need for a gradient differs from the plan.
        """
        training = torch.is_grad_enabled()
        for value, boundary in zip(values, self._planned, strict=True):
            _check(value, boundary, self._stage, training)
        wanted = [values[index] for index in self._with_gradient]
        parts = [(torch.view_as_real(each) if each.is_complex() else each).to(self._dtype).reshape(-1) for each in wanted]
        parts += [_bits(values[index].detach().to(self._device), self._dtype) for index in self._without]
        if size > sum(self._sizes):
            parts.append(torch.zeros(size - sum(self._sizes), dtype=self._dtype, device=self._device))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(1, 1, -1)

    def unpack(self, carrier: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = carrier.view(-1)
        rest = flat.numel() - sum(self._sizes)
        parts = torch.split(flat, [*self._sizes, rest] if rest else self._sizes) if self._sizes else ()
        values: dict[int, torch.Tensor] = {}
        for index, part in zip((*self._with_gradient, *self._without), parts, strict=False):
            boundary = self._planned[index]
            values[index] = _from_real(part, boundary) if boundary.requires_grad else _from_bits(part.detach(), boundary)
        return tuple(values[index] for index in range(len(self._planned)))


def carrier_dtype(boundaries: Sequence[Boundary], weights: torch.dtype) -> torch.dtype:
    """Return the type that holds every value with a gradient exactly, or the weights' type if there is none."""
    found = [boundary.dtype.to_real() for boundary in boundaries if boundary.requires_grad]
    return reduce(torch.promote_types, found) if found else weights


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.made = received.shape, received.new_zeros(())
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, ctx.made.expand(ctx.shape)


def with_zero_gradient(output: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Return a stage's output, with a backward that gives ``received`` a gradient of zeros even if nothing uses it.

    The previous stage waits for a gradient.
    """
    return _ZeroGradient.apply(output, received)  # type: ignore[no-untyped-call,no-any-return]


def _check(value: torch.Tensor, boundary: Boundary, stage: int, training: bool) -> None:
    wanted = boundary.requires_grad and training
    found = (tuple(value.shape), value.dtype, value.requires_grad and training)
    if found != (planned := (boundary.shape, boundary.dtype, wanted)):
        raise BuildError(
            f"stage {stage} gives {boundary.name!r} with (shape, dtype, requires_grad) {found}, but {planned} was planned"
        )


def _from_real(part: torch.Tensor, boundary: Boundary) -> torch.Tensor:
    if boundary.dtype.is_complex:
        return torch.view_as_complex(part.view(*boundary.shape, 2).to(boundary.dtype.to_real()))
    return part.view(boundary.shape).to(boundary.dtype)


def _bits(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of a tensor as elements of ``dtype``, padded with zeros."""
    raw = value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    rest = -raw.numel() % dtype.itemsize
    return (torch.cat([raw, raw.new_zeros(rest)]) if rest else raw).view(dtype)


def _from_bits(part: torch.Tensor, boundary: Boundary) -> torch.Tensor:
    """Return the value in new memory: the carrier's may be misaligned for its type, and a module may write into it."""
    raw = part.contiguous().view(torch.uint8)[: prod(boundary.shape) * boundary.dtype.itemsize]
    return raw.clone().view(boundary.dtype).view(boundary.shape)


class Borders(NamedTuple):
    """Communication of the values between the stages of one plan.

    ``layouts`` are those of the carrier that each stage receives, ``size`` the largest one's number of elements.
    """

    dtype: torch.dtype
    layouts: tuple[Layout, ...]
    size: int


def borders(stages: Sequence[Stage], weights: torch.dtype, device: torch.device) -> Borders:
    """Return the borders of a plan, given its stages; they are the same on every rank."""
    dtype = carrier_dtype([boundary for stage in stages for boundary in stage.inputs], weights)
    layouts = tuple(Layout(stage.inputs, dtype, stage.index - 1, device) for stage in stages)
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
        one: torch.Tensor = output
        if not self.post_process:
            assert self._borders is not None
            layout = self._borders.layouts[self._index + 1]
            one = layout.pack(output, layout.size if self._is_alone else self._borders.size)
        if self._index and torch.is_grad_enabled():
            assert self._received is not None
            one = with_zero_gradient(one, self._received)
        self._received = (
            None  # Megatron keeps it until its backward; here it would stay, with its gradient, until the next step
        )
        # Megatron divides a loss in place, and may free a tensor after sending it
        is_changed = self.post_process or self.config.deallocate_pipeline_outputs
        return one.clone() if is_changed else one


def ties_of(program: Program, state: ParallelState) -> list[Tie]:
    """Return this rank's parameters that are tied to other ranks' stages; ``state`` destroys the new groups. Collective."""
    ends = (0, program.axis_size("pp") - 1) if state.is_ours else ()  # the user's embedding group may differ
    # reuse Megatron's group of the first and the last stage; all ranks take the same branch
    ties = tied_groups(program, lambda places, ranks: state.groups.embd if places == ends else state.group(ranks))
    for tie in ties:
        private.mark_tie(tie.parameter, is_first=dist.get_rank() == tie.first)
    return ties
