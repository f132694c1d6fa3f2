"""The engine of the dialect ``deepspeed``: a program on DeepSpeed's own engine."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core.agreement import agree, compare
from slapo_core.engine import Engine
from slapo_core.errors import BuildError
from slapo_core.parameters import is_part
from slapo_core.program import Program
from slapo_training.batches import Batch, check_labels, content, fingerprint, labels_of, signature, split
from slapo_training.common_batch import Cut, cut_together
from slapo_training.label_weights import LabelWeights
from slapo_training.losses import CountedLoss, check_has_gradient
from slapo_training.optimizers import made, scheduled_rate

from . import checkpoint
from .groups import MeshGroups
from .options import DeepSpeedOptions, dtype_of
from .pipeline import RunningStage, in_pipeline, release_others, steps
from .starting import start, without_warnings


class DeepSpeedEngine(Engine):
    """Trains or evaluates a model on DeepSpeed's engine.

    Every method is collective over the mesh.

    Attributes:
        model: DeepSpeed's engine.
        module: This rank's stage, or the model; with stage 3 of ZeRO its parameters are empty between steps.
        optimizer: DeepSpeed's, around the one given; None where there is none.
        lr_scheduler: The schedule of its learning rate, or None.
        grad_norm: Norm of all gradients of the last step before clipping; None where DeepSpeed computes none.
    """

    def __init__(self, program: Program, options: DeepSpeedOptions) -> None:
        self._program, self._options = program, options
        self._device_type = program.mesh.device_type if program.mesh is not None else "cpu"
        compare(options.agreed(), program.mesh)
        deepspeed, self._is_alone = start(self._device_type)
        self.module: nn.Module = program.stages[program.axis_rank("pp")].module
        _mark_shards(self.module)
        self._stage = None if len(program.stages) == 1 else RunningStage(program, options.loss_fn, options.settled_precision)
        self._plan: Program | None = None
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        optimizer, rate = self._of_rank(trainable)
        pipelined = None if self._stage is None else in_pipeline(program, self._stage)
        if pipelined is not None:
            release_others(program, self.module, dtype_of(options.settled_precision))
        with without_warnings():
            self.model, self.optimizer, _, self.lr_scheduler = deepspeed.initialize(
                model=pipelined or self.module,
                optimizer=optimizer,
                model_parameters=trainable if optimizer is None and options.trains else None,
                lr_scheduler=rate,
                mpu=MeshGroups(program) if program.mesh is not None and pipelined is None else None,
                config=options.settled(),
            )
        self._device = self.model.device
        self._loss = CountedLoss(options.loss_fn)
        self.grad_norm: float | None = None

    def _of_rank(self, trainable: list[nn.Parameter]) -> tuple[torch.optim.Optimizer | None, Any]:
        """The optimizer and its learning rate's schedule, where DeepSpeed does not make them. Collective."""
        error, given = None, self._options
        found: tuple[torch.optim.Optimizer | None, Any] = (None, None)
        try:
            if given.optimizer is not None:
                optimizer = made(given.optimizer, trainable, self._program.module, self.module)
                rate = given.lr_scheduler
                found = optimizer, None if rate is None else scheduled_rate(rate, optimizer)
        except Exception as err:
            error = err
        agree(error, self._program.mesh)
        return found

    def train_batch(self, **batch: Any) -> torch.Tensor:
        """Forward, backward and one optimizer step; see ``Engine.train_batch``.

        Raises:
            BuildError: there is no optimizer; the batch cannot be cut into equal micro-batches; the micro-batches or ranks have
                different numbers of labels, and which of them the loss counts cannot be told.
        """
        if not self._options.trains:
            raise BuildError("this engine was built without an optimizer and only evaluates; pass optimizer= to build")
        parts, labels, weights = self._cut(batch, training=True)
        if self._stage is not None:
            self._begin(self._stage, parts, labels, weights)
            loss = torch.as_tensor(self.model.train_batch(steps(len(parts)))).detach().float()
        else:
            self.model.train()
            loss = self._mean([self._train_part(*each, weights) for each in zip(range(len(parts)), parts, labels, strict=True)])
        norm = self.model.get_global_grad_norm()
        self.grad_norm = None if norm is None else float(norm)
        return loss

    @torch.no_grad()
    def eval_batch(self, **batch: Any) -> torch.Tensor:
        """The mean loss in evaluation mode, without gradients; see ``Engine.eval_batch``."""
        parts, labels, weights = self._cut(batch, training=False)
        if self._stage is not None:
            self._begin(self._stage, parts, labels, weights)
            return torch.as_tensor(self.model.eval_batch(steps(len(parts)))).detach().float()
        self.model.eval()
        return self._mean([self._part(*each, weights) for each in zip(range(len(parts)), parts, labels, strict=True)])

    def save(self, path: str | PathLike[str]) -> None:
        """Write a checkpoint of DeepSpeed's, and the random states, to the directory ``path``."""
        checkpoint.save(self.model, path, self._program, self._options.zero_stage)

    def load(self, path: str | PathLike[str]) -> None:
        """Go on exactly from what ``save`` wrote; without ZeRO also with another number of replicas.

        Raises:
            BuildError: no complete checkpoint, or one of another layout.
        """
        checkpoint.load(self.model, path, self._program, self._options.zero_stage)

    def close(self) -> None:
        """Take DeepSpeed's hooks off the model; it trains no more."""
        self.model.destroy()
        if self._is_alone and dist.is_initialized():
            dist.destroy_process_group()

    # ---- one step

    def _cut(self, batch: Mapping[str, Any], training: bool) -> tuple[list[Batch], list[Any], LabelWeights]:
        """The micro-batches, their labels for a loss function, and what each weighs. Collective."""

        def cut() -> Cut:
            parts = split(batch, self._options.parts)
            check_labels(batch, self._program.module, self._options.loss_fn)
            counts = labels_of(parts, self._options.ignored_label)
            return Cut(parts, counts, fingerprint([training, signature(parts[0])]), content(batch))

        parts, weights = cut_together(self._program, self._device, cut)
        self.module.train(training)
        has_loss_fn = self._options.loss_fn is not None
        return parts, [part.pop("labels") if has_loss_fn else None for part in parts], weights

    def _begin(self, stage: RunningStage, parts: list[Batch], labels: list[Any], weights: LabelWeights) -> None:
        """Make the stage ready for micro-batches like these; DeepSpeed is told where what crosses has another shape."""
        assert self._program.replan is not None
        plan = self._program.replan(self.module.training, parts[0])  # the same one, unless the model has changed
        stage.begin(plan, parts, labels, weights)
        if plan is not self._plan:
            self.model.reset_activation_shape()
            self._plan = plan

    def _train_part(self, index: int, part: Batch, labels: Any, weights: LabelWeights) -> torch.Tensor:
        loss = self._part(index, part, labels, weights)
        check_has_gradient(loss)
        self.model.backward(loss)
        self.model.step()
        return loss.detach()

    def _part(self, index: int, part: Batch, labels: Any, weights: LabelWeights) -> torch.Tensor:
        """The loss of a micro-batch, by what it weighs."""
        loss, counted = self._loss(lambda: self.model(**part), labels)
        return weights.weighted(index, loss, counted)

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Over this rank's micro-batches and all replicas."""
        mean = torch.stack([loss.detach().float() for loss in losses]).mean()
        dp = self._program.axis_size("dp")
        if dp > 1:
            assert self._program.mesh is not None
            dist.all_reduce(mean, group=self._program.mesh.get_group("dp"))
        return mean / dp


def _mark_shards(module: nn.Module) -> None:
    """What DeepSpeed reads to count the gradients of each shard in the norm, and of what is whole once."""
    for parameter in module.parameters():
        if is_part(parameter):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
