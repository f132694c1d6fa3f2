"""One loss of the outputs of all micro-batches and replicas: the option ``loss_over="replicas"``.

With several micro-batches each runs twice. The first run keeps no graph: its outputs are gathered, and the loss and its
gradient for each output are computed once. The second run draws the same random numbers, and its backward starts from these
gradients. With one micro-batch the only run keeps its graph meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core.agreement import all_reduce
from slapo_core.errors import BuildError
from slapo_core.program import Program
from slapo_core.random import RNGState, rng_state, set_rng_state

from .batches import fingerprint
from .losses import LossFn, MicroBatchLoss, loss_of
from .structures import tensors_of, with_tensors

OVER_REPLICAS = "replicas"
"""The value of the option."""

Gradients = dict[str, torch.Tensor]
"""Gradients of the loss for the tensors of one micro-batch's output, by their paths, each times ``ReplicaLoss.scale``."""


class ReplicaFailedError(BuildError):
    """Said of another replica, which raises an error of its own."""


class ReplicaLoss:
    """The loss of a whole batch, by its outputs on all replicas.

    Args:
        program: Its mesh has the replicas.
        loss_fn: ``loss_fn(outputs, labels)``.
        device: For what is sent.
        precision: Makes the context in which the engine runs the model and its loss.
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

    def first_runs(self, number: int) -> list[FirstRun]:
        """Return what so many micro-batches are run with, forward only, before ``second_runs``."""
        return [FirstRun(self._device) for _ in range(number)]

    def evaluated(self, runs: Sequence[FirstRun], labels: Sequence[Any], rows: int | None) -> torch.Tensor:
        """Return the loss of micro-batches that were run, on ranks that have the last stage; 0 elsewhere. Collective.

        Args:
            runs: Theirs.
            labels: Theirs, for the loss function.
            rows: Of a micro-batch.
        """
        if not self._is_last:
            return torch.zeros((), device=self._device)
        return self._computed([run.output for run in runs], labels, rows, training=False)[0]

    def shared(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what ``evaluated`` gave, the same on all ranks. Collective."""
        if self._program.axis_rank("tp") or not self._is_last:
            loss = torch.zeros_like(loss)
        dtype = torch.float64 if loss.dtype is torch.float64 else torch.float32
        number = all_reduce(loss.detach().to(self._device, torch.float64), self._program.mesh)
        return (number / self._program.axis_size("dp")).to(dtype)

    def second_runs(self, runs: Sequence[FirstRun], labels: Sequence[Any], rows: int | None) -> list[MicroBatchLoss]:
        """Return what the same micro-batches are run with in training. Collective over the last stages of all replicas.

        Raises:
            BuildError: the outputs cannot be gathered; or the loss function gave no loss.
        """
        if not self._is_last:
            return [SecondRun(run, None, {}, 1) for run in runs]
        loss, gradients = self._computed([run.output for run in runs], labels, rows, training=True)
        return [
            SecondRun(run, loss, each, self._parts(len(runs)) / self.scale) for run, each in zip(runs, gradients, strict=True)
        ]

    def only_run(self, labels: Any, rows: int | None) -> OnlyRun:
        """Return what a single micro-batch is run with in training."""
        return OnlyRun(self, labels, rows)

    def _parts(self, own: int) -> int:
        return own * self._program.axis_size("dp")

    def _computed(
        self, outputs: list[Any], labels: Sequence[Any], rows: int | None, training: bool
    ) -> tuple[torch.Tensor, list[Gradients]]:
        """The loss, and for each of these outputs its gradients."""
        own = [{path: each.detach() for path, each in tensors_of(output).items()} for output in outputs]
        has_rows = {path: each.dim() > 0 and each.shape[0] == rows for path, each in own[0].items()}
        self._meet(_unlike(own), own[0])
        whole = {path: self._gathered([each[path] for each in own], has_rows[path]) for path in own[0]}
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
        return loss.detach(), [self._own(gradients, has_rows, index, len(own)) for index in range(len(own))]

    def _own(self, gradients: Gradients, has_rows: dict[str, bool], index: int, number: int) -> Gradients:
        """The gradients for one of this rank's micro-batches; of a tensor without rows each has the mean of all."""
        place, parts = self._program.axis_rank("dp") * number + index, self._parts(number)
        return {path: each.chunk(parts)[place] if has_rows[path] else each / parts for path, each in gradients.items()}

    def _gathered(self, own: list[torch.Tensor], has_rows: bool) -> torch.Tensor:
        """The tensors of all micro-batches, replica by replica: along dimension 0, or in a new one where they have no rows."""
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
            lambda path, each: self._gathered([own[path].to(self._device) for own in named], True) if each.dim() else each,
        )

    def _meet(self, error: Exception | None, tensors: dict[str, torch.Tensor]) -> None:
        """Go on only where all replicas have outputs of the same kind. Collective over them."""
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
                f"the outputs of replicas differ in their shapes or types: here {_listed(tensors)}; loss_over='replicas' takes "
                "the same from each"
            )

    def _check_same(self, stacked: dict[str, torch.Tensor], own: list[dict[str, torch.Tensor]]) -> None:
        """Raise ``BuildError`` where a tensor without rows depends on the micro-batch."""
        for path, each in stacked.items():
            values = each.to(torch.float64) if _is_real(each) else each
            close = (
                torch.isclose(values, values[:1], rtol=_CLOSE.get(each.dtype, 0.0), atol=1e-7, equal_nan=True)
                if _is_real(each)
                else values == values[:1]
            )
            if not bool(close.all()):
                raise BuildError(
                    f"{_named(path)} has shape {tuple(own[0][path].shape)}, no row for each of the micro-batch's, and differs "
                    "between micro-batches or replicas; return it row by row, with the batch in dimension 0, or leave it out"
                )


class FirstRun(MicroBatchLoss):
    """Keeps the output of a micro-batch, and the random numbers that each stage began with."""

    def __init__(self, device: torch.device) -> None:
        self.output: Any = None
        self.random: dict[int, RNGState] = {}
        self._device = device

    def run(self, stage: Callable[[], Any], index: int = 0) -> Any:
        """Run a stage."""
        self.random[index] = rng_state()
        return stage()

    def loss(self, output: Any) -> torch.Tensor:
        """Return a zero."""
        self.output = with_tensors(output, lambda _, each: each.detach())
        return torch.zeros((), device=self._device)


class SecondRun(MicroBatchLoss):
    """Runs a micro-batch again, as its first run was, with the loss of the whole batch and its gradients.

    Args:
        first: The first run.
        value: The loss.
        gradients: Of it.
        factor: Of the gradients: the engine takes a mean over the micro-batches of all replicas.
    """

    def __init__(self, first: FirstRun, value: torch.Tensor | None, gradients: Gradients, factor: float) -> None:
        self._first, self._value, self._gradients, self._factor = first, value, gradients, factor

    def run(self, stage: Callable[[], Any], index: int = 0) -> Any:
        """Run a stage with the random numbers of its first run."""
        set_rng_state(self._first.random[index])
        return stage()

    def loss(self, output: Any) -> torch.Tensor:
        """Return the whole batch's loss, whose backward gives each output its gradient."""
        assert self._value is not None
        return with_gradients(self._value, tensors_of(output), self._gradients, self._factor)


class OnlyRun(MicroBatchLoss):
    """Gathers the outputs of a micro-batch as they are there, and computes the loss and its gradients."""

    def __init__(self, loss: ReplicaLoss, labels: Any, rows: int | None) -> None:
        self._loss, self._labels, self._rows = loss, labels, rows
        self._has_met = not loss._is_last

    def loss(self, output: Any) -> torch.Tensor:
        """Return the whole batch's loss, whose backward gives each output its gradient."""
        self._has_met = True
        value, gradients = self._loss._computed([output], [self._labels], self._rows, training=True)
        return with_gradients(value, tensors_of(output), gradients[0], self._loss._parts(1) / self._loss.scale)

    def fail(self, error: Exception) -> None:
        """Tell the other replicas, which wait for this one's output."""
        if not self._has_met:
            self._has_met = True
            with suppress(type(error)):
                self._loss._meet(error, {})


def with_gradients(value: torch.Tensor, tensors: dict[str, torch.Tensor], gradients: Gradients, factor: float) -> torch.Tensor:
    """Return a number whose backward gives tensors these gradients, times a factor."""
    paths = [path for path, each in tensors.items() if path in gradients and each.requires_grad]
    loss: torch.Tensor = _WithGradients.apply(  # type: ignore[no-untyped-call]
        value, factor, [gradients[path] for path in paths], *(tensors[path] for path in paths)
    )
    return loss


class _WithGradients(torch.autograd.Function):
    """A number with known gradients."""

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


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Run the model inside of this without a change of its buffers: a second run starts from the same ones."""
    kept = [
        (table, name, tensor, tensor.clone())
        for table in (each._buffers for each in module.modules())
        for name, tensor in table.items()
        if tensor is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for table, name, tensor, values in kept:
                table[name] = tensor
                tensor.copy_(values)


@contextmanager
def draws_kept() -> Iterator[None]:
    """Put the random state back behind what runs inside."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


_CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Relative differences that rounding makes."""


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _unlike(own: list[dict[str, torch.Tensor]]) -> BuildError | None:
    """The error of micro-batches whose outputs are not of one kind."""
    for each in own[1:]:
        if _listed(each) != _listed(own[0]):
            return BuildError(
                f"the outputs of micro-batches differ: {_listed(own[0])} and {_listed(each)}; loss_over='replicas' takes the "
                "same from each"
            )
    return None if own[0] else BuildError("the model returns no tensor, and loss_over='replicas' gathers its outputs")


def _listed(tensors: dict[str, torch.Tensor]) -> str:
    return ", ".join(
        f"{_named(path)} {tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for path, each in tensors.items()
    )


def _named(path: str) -> str:
    return f"output {path!r}" if path else "the output"
