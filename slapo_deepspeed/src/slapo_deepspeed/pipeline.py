"""Stages in DeepSpeed's ``PipelineModule``: each rank has one, and what of it DeepSpeed has to know."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Boundary, Program, Stage, is_sharded
from slapo_training.batches import Batch
from slapo_training.engines import copies
from slapo_training.label_weights import LabelWeights
from slapo_training.losses import CountedLoss, LossReduction, check_has_gradient, run_stage
from slapo_training.model import TrainingMode

from .boundary_packing import pack, unpack


class RunningStage(nn.Module):
    """A stage as DeepSpeed's pipeline calls it, once for each micro-batch in order.

    What a stage reads from the batch it finds by the number of the micro-batch: DeepSpeed gives batches to the first and last
    stage alone.

    Args:
        program: Its stages are on as many ranks.
        loss_of: Computes the loss in the last stage.
        dtype: Of the weights.
    """

    def __init__(self, program: Program, loss_of: CountedLoss, dtype: torch.dtype) -> None:
        super().__init__()
        self._index = program.axis_rank("pp")
        self.stage = program.stages[self._index].module
        self._dtype = dtype
        self._loss_of = loss_of
        self._inputs: tuple[Boundary, ...] = ()
        self._outputs: tuple[Boundary, ...] | None = None
        self._stages: list[Stage] = []
        self._names: tuple[str, ...] = ()
        self._weights: LabelWeights | None = None
        self._parts: Iterator[tuple[int, Batch, Any]] = iter(())
        self.counted: list[LossReduction] = []

    def begin(self, programs: Sequence[Program], parts: list[Batch], labels: list[Any], weights: LabelWeights | None) -> None:
        """Begin a step.

        Args:
            programs: One for each micro-batch.
            parts: These.
            labels: Theirs, for the loss function.
            weights: What each weighs in the loss; None for all alike.
        """
        program, last = programs[0], self._index == len(programs[0].stages) - 1
        self._stages = [each.stages[self._index] for each in programs]
        self._inputs = self._stages[0].inputs
        self._outputs = None if last else program.stages[self._index + 1].inputs
        self.counted = []
        self._weights, self._parts = weights, iter([*zip(range(len(parts)), parts, labels, strict=True)])
        self._select(0)

    def _select(self, microbatch: int) -> None:
        self._modules["stage"], self._names = self._stages[microbatch].module, self._stages[microbatch].batch_inputs

    def forward(self, received: Any) -> Any:
        """Run one micro-batch; the first stage receives nothing that counts."""
        index, part, labels = next(self._parts)
        self._select(index)
        values = unpack(received, self._inputs, self._dtype) if self._index else ()
        batch = {name: part[name] for name in self._names if name in part}
        if self._outputs is not None:
            sent = run_stage(labels, lambda: self.stage(*values, **batch), self._index)
            return pack(sent, self._outputs, self._index)
        loss, counted = self._loss_of(lambda: self.stage(*values, **batch), labels, self._index)
        check_has_gradient(loss)
        self.counted.append(counted)
        return loss if self._weights is None else self._weights.weighted(index, loss, counted)


def in_pipeline(program: Program, stage: RunningStage, modes: TrainingMode) -> Any:
    """DeepSpeed's ``PipelineModule`` of one stage on each rank, this rank's being ``stage``. Collective."""
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    sizes = {axis: program.axis_size(axis) for axis in ("pp", "dp", "tp")}
    topology = PipeModelDataParallelTopology(num_pp=sizes["pp"], num_mp=sizes["tp"], num_dp=sizes["dp"])
    ties = _ties(program)

    class Stages(PipelineModule):  # type: ignore[misc]
        """Its tied weights are those of the program; DeepSpeed's own are whole layers."""

        stays_in_training = False

        def train(self, mode: bool = True) -> Any:
            super().train(mode or self.stays_in_training)
            modes.restore_frozen()
            return self

        def _index_tied_modules(self) -> dict[str, Any]:
            for parameter, _, first in ties:
                parameter.ds_pipe_replicated = dist.get_rank() != first  # type: ignore[attr-defined]
            return {}

        def _synchronize_tied_weights(self) -> None:
            for parameter, group, first in ties:
                dist.broadcast(parameter.data, first, group=group)

        def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
            found = [(parameter, group) for parameter, group, _ in ties if parameter.requires_grad]
            for parameter, _ in found:
                if parameter.grad is None:  # DeepSpeed would leave out the sum on this rank alone, which others wait for
                    parameter.grad = torch.zeros_like(parameter)
            return found

    own = program.axis_rank("pp")
    layers = [stage if index == own else LayerSpec(nn.Identity) for index in range(sizes["pp"])]
    with redirect_stdout(io.StringIO()):  # it prints these layers, which are none of the model's
        made = Stages(layers, topology=topology, loss_fn=None, partition_method="uniform")
    for parameter in stage.parameters():
        # without ZeRO the norm leaves out what is not marked on every stage but the first, and counts what is marked anywhere
        is_first = not getattr(parameter, "ds_pipe_replicated", False)
        parameter.model_parallel = is_first and program.axis_rank("tp") == 0  # type: ignore[attr-defined]
        parameter.tensor_model_parallel = is_first and is_sharded(parameter)  # type: ignore[attr-defined]
    return made


@contextmanager
def staying(stages: Any, training: bool) -> Iterator[None]:
    """Let stages be in training mode inside, if they are to: DeepSpeed evaluates whatever it runs forward alone."""
    stages.stays_in_training = training
    stages.train(training)
    try:
        yield
    finally:
        stages.stays_in_training = False


def _ties(program: Program) -> list[tuple[nn.Parameter, dist.ProcessGroup, int]]:
    """This rank's tied parameters, each with the ranks that have it and the first of these. Collective."""
    found = [(parameter, dist.new_group(ranks), ranks) for parameter, _, ranks in copies(program)]
    return [(parameter, group, ranks[0]) for parameter, group, ranks in found if dist.get_rank() in ranks]


def steps(number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What DeepSpeed reads as a batch: one for each micro-batch, of no values."""
    nothing = torch.zeros((), dtype=torch.int64)
    return iter([(nothing, nothing)] * number)
