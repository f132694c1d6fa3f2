"""One loss of the outputs of all micro-batches and replicas: the option ``loss_over="replicas"``.

Each of several micro-batches runs forward twice. The first pass keeps no graph. Its outputs are gathered, and the loss and its
gradients for the outputs are computed once. The second pass uses the same random numbers; its backward starts from these
gradients. With one micro-batch, a single pass keeps its graph while outputs are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from slapo_core import BuildError, Program, RNGState, rng_state, set_rng_state

from ..batches.microbatches import fingerprint
from ..batches.nested_tensors import tensors_of, with_tensors
from ..distributed.ranks import all_reduce
from .microbatch_loss import LossFn, MicroBatchLoss, loss_of

OVER_REPLICAS = "replicas"
"""The value of the option."""

Gradients = dict[str, torch.Tensor]
"""Gradients of the loss for the tensors of one micro-batch's output, by path, times ``ReplicaLoss.scale``."""


class ReplicaFailedError(BuildError):
    """Error on this rank because another replica failed with its own error."""


class ReplicaLoss:
    """Loss of a whole batch, computed from its outputs on all replicas.

    Args:
        loss_fn: ``loss_fn(outputs, labels)``.
        precision: Function that makes the engine's precision context.

    Attributes:
        scale: Loss scale of fp16; 1 otherwise.
    """

    def __init__(
        self,
        program: Program,
        loss_fn: LossFn,
        device: torch.device,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._program, self._loss_fn, self._device, self._precision = program, loss_fn, device, precision
        self._is_last = program.rank_of(len(program.stages) - 1) == program.axis_rank("pp")
        self._group = program.mesh.get_group("dp") if program.mesh is not None and program.axis_size("dp") > 1 else None
        self.scale = 1.0

    def first_passes(self, number: int) -> list[FirstPass]:
        """Return the losses of ``number`` micro-batches for the forward before ``second_passes``."""
        return [FirstPass(self._device) for _ in range(number)]

    def evaluate(self, passes: Sequence[FirstPass], labels: Sequence[Any], rows: int | None) -> torch.Tensor:
        """Return the loss after the first passes on ranks with the last stage, 0 elsewhere. Collective over the replicas.

        A micro-batch has ``rows`` rows.

        Raises:
            BuildError: the outputs cannot be gathered, or the loss function returned no loss.
        """
        if not self._is_last:
            return torch.zeros((), device=self._device)
        return self._loss_and_gradients([each.output for each in passes], labels, rows, training=False)[0]

    def on_all_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the mean of the last stages' ``evaluate`` on all ranks. Collective."""
        if self._program.axis_rank("tp") or not self._is_last:
            loss = torch.zeros_like(loss)
        dtype = torch.float64 if loss.dtype is torch.float64 else torch.float32
        number = all_reduce(loss.detach().to(self._device, torch.float64), self._program.mesh)
        return (number / self._program.axis_size("dp")).to(dtype)

    def second_passes(self, passes: Sequence[FirstPass], labels: Sequence[Any], rows: int | None) -> list[MicroBatchLoss]:
        """Return the losses to train the same micro-batches with. Collective over the last stages of all replicas.

        A micro-batch has ``rows`` rows.

        Raises:
            BuildError: the outputs cannot be gathered, or the loss function returned no loss.
        """
        if not self._is_last:
            return [SecondPass(each, None, {}, 1) for each in passes]
        loss, gradients = self._loss_and_gradients([each.output for each in passes], labels, rows, training=True)
        factor = self._num_parts(len(passes)) / self.scale
        return [SecondPass(first, loss, own, factor) for first, own in zip(passes, gradients, strict=True)]

    def _num_parts(self, own: int) -> int:
        """Return the number of micro-batches of all replicas, with ``own`` on each."""
        return own * self._program.axis_size("dp")

    def _first_part(self, own: int) -> int:
        return own * self._program.axis_rank("dp")

    def _loss_and_gradients(
        self, outputs: list[Any], labels: Sequence[Any], rows: int | None, training: bool
    ) -> tuple[torch.Tensor, list[Gradients]]:
        """Return the loss, and in training its gradients with respect to each of these outputs."""
        own = [{path: each.detach() for path, each in tensors_of(output).items()} for output in outputs]
        has_rows = {path: each.dim() > 0 and each.shape[0] == rows for path, each in own[0].items()}
        self._check_kinds(_mismatch(own), own[0])
        whole = {path: self._gather_outputs([each[path] for each in own], has_rows[path]) for path in own[0]}
        self._check_same({path: each for path, each in whole.items() if not has_rows[path]}, own)
        for path, each in whole.items():
            whole[path] = (each if has_rows[path] else own[0][path].clone()).requires_grad_(training and _is_real(each))
        all_labels = self._all_labels(labels)
        with torch.set_grad_enabled(training), self._precision():
            loss = loss_of(with_tensors(outputs[0], lambda path, _: whole[path]), self._loss_fn, all_labels)
        if not training:
            return loss.detach(), []
        if not loss.requires_grad:
            raise BuildError("the loss has no gradient: loss_fn uses none of the model's outputs")
        leaves = [path for path, each in whole.items() if each.requires_grad]
        scale = torch.full_like(loss, self.scale)
        found = torch.autograd.grad(loss, [whole[path] for path in leaves], scale, allow_unused=True)
        gradients = {path: each for path, each in zip(leaves, found, strict=True) if each is not None}
        first, parts = self._first_part(len(own)), self._num_parts(len(own))
        return loss.detach(), [
            # gradients of tensors without rows are divided equally
            {path: each.chunk(parts)[place] if has_rows[path] else each / parts for path, each in gradients.items()}
            for place in range(first, first + len(own))
        ]

    def _gather_outputs(self, own: list[torch.Tensor], has_rows: bool) -> torch.Tensor:
        """Concatenate the tensors of all micro-batches, replica by replica; stack tensors without rows."""
        mine = torch.cat(own) if has_rows else torch.stack(own)
        if self._group is None:
            return mine
        parts = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(parts, mine.contiguous(), group=self._group)
        return torch.cat(parts)

    def _all_labels(self, labels: Sequence[Any]) -> Any:
        named = [tensors_of(each) for each in labels]
        return with_tensors(
            labels[0],
            lambda path, each: (
                self._gather_outputs([own[path].to(self._device) for own in named], True) if each.dim() else each
            ),
        )

    def _check_kinds(self, error: Exception | None, tensors: dict[str, torch.Tensor]) -> None:
        """Check that no replica has an error and that all outputs have the same shapes and dtypes. Collective over replicas."""
        kinds = fingerprint([(path, tuple(each.shape), str(each.dtype)) for path, each in tensors.items()])
        row = [error is not None, *((0, 0) if error is not None else (kinds, -kinds))]
        found = torch.tensor(row, dtype=torch.int64, device=self._device)
        if self._group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        failed, high, low = found.tolist()
        if error is not None:
            raise error
        if failed:
            raise ReplicaFailedError("another replica failed before its outputs could be gathered")
        if high != -low:
            raise BuildError(
                f"the outputs of replicas differ in their shapes or types: here {_describe(tensors)}; "
                "loss_over='replicas' takes the same from each"
            )

    def _check_same(self, stacked: dict[str, torch.Tensor], own: list[dict[str, torch.Tensor]]) -> None:
        """Raise ``BuildError`` if a tensor without rows depends on the micro-batch."""
        for path, each in stacked.items():
            values = each.to(torch.float64) if _is_real(each) else each
            close = (
                torch.isclose(values, values[:1], rtol=_TOLERANCES.get(each.dtype, 0.0), atol=1e-7, equal_nan=True)
                if _is_real(each)
                else values == values[:1]
            )
            if not bool(close.all()):
                raise BuildError(
                    f"{_output_name(path)} has shape {tuple(own[0][path].shape)}, which has no row for each row of "
                    "the micro-batch, and differs between micro-batches or replicas; return it row by row, with the batch in "
                    "dimension 0, or omit it"
                )


class FirstPass(MicroBatchLoss):
    """First pass of a micro-batch; keeps its output and each stage's random state."""

    def __init__(self, device: torch.device) -> None:
        self.output: Any = None
        self.random: dict[int, RNGState] = {}
        self._device = device

    def run(self, stage: Callable[[], Any], index: int = 0) -> Any:
        self.random[index] = rng_state()
        return stage()

    def loss(self, output: Any) -> torch.Tensor:
        """Keep the output; return zero."""
        self.output = with_tensors(output, lambda _, each: each.detach())
        return torch.zeros((), device=self._device)


class SecondPass(MicroBatchLoss):
    """Second pass of a micro-batch, whose backward starts from gradients of the whole batch's loss.

    Args:
        value: The loss; None on ranks without the last stage.
        factor: Factor of the gradients, since the engine averages over the micro-batches of all replicas.
    """

    def __init__(self, first: FirstPass, value: torch.Tensor | None, gradients: Gradients, factor: float) -> None:
        self._first, self._value, self._gradients, self._factor = first, value, gradients, factor

    def run(self, stage: Callable[[], Any], index: int = 0) -> Any:
        """Run a stage with the random numbers of its first pass."""
        set_rng_state(self._first.random[index])
        return stage()

    def loss(self, output: Any) -> torch.Tensor:
        """Return the whole batch's loss; its backward passes each output its gradient."""
        assert self._value is not None
        return with_gradients(self._value, tensors_of(output), self._gradients, self._factor)


class SinglePass(MicroBatchLoss):
    """Only pass of a replica's only micro-batch: gathers outputs, and computes the loss and its gradients."""

    def __init__(self, loss: ReplicaLoss, labels: Any, rows: int | None) -> None:
        self._loss, self._labels, self._rows = loss, labels, rows
        self._is_gathered = not loss._is_last

    def loss(self, output: Any) -> torch.Tensor:
        self._is_gathered = True
        value, gradients = self._loss._loss_and_gradients([output], [self._labels], self._rows, training=True)
        return with_gradients(value, tensors_of(output), gradients[0], self._loss._num_parts(1) / self._loss.scale)

    def fail(self, error: Exception) -> None:
        """Report the failure to the other replicas, which wait for this replica's output."""
        if not self._is_gathered:
            self._is_gathered = True
            with suppress(type(error)):
                self._loss._check_kinds(error, {})


def with_gradients(value: torch.Tensor, tensors: dict[str, torch.Tensor], gradients: Gradients, factor: float) -> torch.Tensor:
    """Return a tensor of this value whose backward passes ``gradients`` times ``factor`` to ``tensors``."""
    paths = [path for path, each in tensors.items() if path in gradients and each.requires_grad]
    loss: torch.Tensor = _WithGradients.apply(  # type: ignore[no-untyped-call]
        value, factor, [gradients[path] for path in paths], *(tensors[path] for path in paths)
    )
    return loss


class _WithGradients(torch.autograd.Function):
    """Autograd node of a number with known gradients."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float, gradients: list[torch.Tensor], *tensors: torch.Tensor) -> Any:
        ctx.gradients, ctx.factor = gradients, factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = gradient * ctx.factor
        return (
            None,
            None,
            None,
            *((each * factor.to(torch.promote_types(each.dtype, torch.float32))).to(each.dtype) for each in ctx.gradients),
        )


_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Relative rounding differences by dtype."""


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _mismatch(own: list[dict[str, torch.Tensor]]) -> BuildError | None:
    """Return the error for outputs of micro-batches with different shapes or dtypes or without tensors, or None."""
    for each in own[1:]:
        if _describe(each) != _describe(own[0]):
            return BuildError(
                f"the outputs of micro-batches differ: {_describe(own[0])} and {_describe(each)}; "
                "loss_over='replicas' takes the same from each"
            )
    return None if own[0] else BuildError("the model returns no tensor, and loss_over='replicas' gathers its outputs")


def _describe(tensors: dict[str, torch.Tensor]) -> str:
    return ", ".join(
        f"{_output_name(path)} {tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for path, each in tensors.items()
    )


def _output_name(path: str) -> str:
    return f"output {path!r}" if path else "the output"
