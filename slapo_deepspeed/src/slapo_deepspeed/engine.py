"""The engine of the dialect ``deepspeed``: a program on DeepSpeed's own engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_map_only

from slapo_core.agreement import all_reduce, compare
from slapo_core.engine import Engine
from slapo_core.errors import BuildError
from slapo_core.parameters import is_part
from slapo_core.program import Program
from slapo_training.batches import Batch, check_labels, content, fingerprint, labels_of, signature, split
from slapo_training.common_batch import Cut, cut_together
from slapo_training.label_weights import LabelWeights
from slapo_training.losses import CountedLoss, check_has_gradient
from slapo_training.means import EQUAL_PARTS, Counted
from slapo_training.meeting import on_all
from slapo_training.modes import Modes
from slapo_training.optimizers import made, scheduled_rate
from slapo_training.options import is_rate

from . import checkpoint
from .groups import MeshGroups
from .options import DTYPES, DeepSpeedOptions
from .pipeline import RunningStage, in_pipeline, release_others, steps
from .starting import start, without_warnings
from .whole_gradients import WholeGradients


class DeepSpeedEngine(Engine):
    """Trains or evaluates a model on DeepSpeed's engine.

    Every method is collective over the mesh. An error within a step, which its other ranks may wait for, ends the engine.

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
        self._deepspeed, self._is_alone = start(self._device_type)
        self.module: nn.Module = program.stages[program.axis_rank("pp")].module
        _mark_shards(self.module)
        self._modes = Modes(program.module)
        dtype = DTYPES[options.settled_precision]
        self._stage = RunningStage(program, options.loss_fn, dtype) if len(program.stages) > 1 else None
        self._plan: Program | None = None
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        optimizer, rate = self._of_rank(trainable)
        pipelined = None if self._stage is None else in_pipeline(program, self._stage, self._modes)
        if pipelined is not None:
            release_others(program, self.module, dtype)
        with without_warnings():
            self.model, self.optimizer, _, self.lr_scheduler = self._deepspeed.initialize(
                model=pipelined or self.module,
                optimizer=optimizer,
                model_parameters=trainable if optimizer is None and options.trains else None,
                lr_scheduler=rate,
                mpu=MeshGroups(program) if program.mesh is not None and pipelined is None else None,
                config=options.settled(),
            )
        if self._stage is not None:
            self.model._allocate_or_extend_buffers = self._buffer
        self._device = self.model.device
        self._loss = CountedLoss(options.loss_fn)
        self._counted: list[Counted | None] = []
        self._gradients = WholeGradients(program, self.module)
        self._kind: int | None = None
        self._is_broken = self._is_half_read = False
        self.grad_norm: float | None = None

    def _buffer(self, index: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for one received tensor. DeepSpeed would give activations and gradients the same, whatever their types."""
        return torch.empty(shape, dtype=dtype, device=self.model.device)

    def _of_rank(self, trainable: list[nn.Parameter]) -> tuple[torch.optim.Optimizer | None, Any]:
        """The optimizer and its learning rate's schedule, where DeepSpeed does not make them. Collective.

        Raises:
            BuildError: DeepSpeed cannot take them on some rank; an optimizer that was given is unchanged on all then.
        """
        found: list[Any] = [None, None]
        given, rate = self._options.optimizer, self._options.lr_scheduler

        def make() -> None:
            optimizer = made(given, trainable, self._program.module, self.module)
            held = [group for group in optimizer.param_groups if group["params"]]
            if not held:
                raise BuildError("optimizer= has no parameter of a rank's stage; give one of all of the model's parameters")
            if len(held) < len(optimizer.param_groups) and is_rate(rate):
                raise BuildError(
                    "a rank's stage has no parameter of one of the optimizer's groups, which lr_scheduler= was made for; "
                    "give a factory, lambda optimizer: ..."
                )
            optimizer.param_groups[:] = held  # as DeepSpeed does, but before the schedule counts them
            found[:] = optimizer, None if rate is None else scheduled_rate(rate, optimizer)
            if isinstance(found[1], ReduceLROnPlateau):
                raise BuildError("lr_scheduler= gave a ReduceLROnPlateau, which DeepSpeed steps without the loss; give another")

        if given is not None:
            groups = given.param_groups if isinstance(given, torch.optim.Optimizer) else []
            before = [(group, dict(group)) for group in groups]
            try:
                on_all(make, self._program)
            except Exception:
                groups[:] = [_restored(group, facts) for group, facts in before]
                raise
        return found[0], found[1]

    def train_batch(self, **batch: Any) -> torch.Tensor:
        """Forward, backward and one optimizer step; see ``Engine.train_batch``.

        Raises:
            BuildError: there is no optimizer; the batch cannot be cut into equal micro-batches; the micro-batches or ranks have
                different numbers of labels, and which of them the loss counts cannot be told.
        """
        if not self._options.trains:
            raise BuildError("this engine was built without an optimizer and only evaluates; pass optimizer= to build")
        self._check_weights()
        if self._is_broken:
            raise BuildError(
                "an error broke off a step of this engine, and DeepSpeed has kept a part of its gradients; build another "
                "engine, and load a checkpoint"
            )
        parts, labels, weights = self._cut(batch, training=True)
        self._is_broken = True
        loss = self._train(parts, labels, weights)
        self._is_broken = False
        norm = self.model.get_global_grad_norm()
        self.grad_norm = None if norm is None else float(norm)
        return loss

    @torch.no_grad()
    def eval_batch(self, **batch: Any) -> torch.Tensor:
        """The mean loss in evaluation mode, without gradients; see ``Engine.eval_batch``."""
        self._check_weights()
        parts, labels, weights = self._cut(batch, training=False)
        return self._evaluate(parts, labels, weights)[0]

    def save(self, path: str | PathLike[str]) -> None:
        """Write a checkpoint of DeepSpeed's, and the random states, to the directory ``path``."""
        self._check_weights()
        checkpoint.save(self.model, path, self._program, self._options.zero_stage)

    def load(self, path: str | PathLike[str]) -> None:
        """Go on exactly from what ``save`` wrote.

        Also with another number of replicas: without ZeRO, and without pipeline and tensor parallelism; random numbers are
        then this engine's own.

        Raises:
            BuildError: no complete checkpoint, or one of another model or layout, and nothing has changed; or DeepSpeed cannot
                read it to its end, and the engine does nothing before another one is loaded.
        """
        found = checkpoint.checked(self.model, path, self._program, self._options.zero_stage)
        self._is_half_read = True
        checkpoint.load(self.model, found, self._program)
        self._is_half_read = False

    def _check_weights(self) -> None:
        if self._is_half_read:
            raise BuildError("a checkpoint was not read to its end, and this engine's weights may have changed; load another")

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Let this rank have its parameters whole inside, as ``Schedule.full_state`` takes them. Collective.

        With stage 3 of ZeRO they are empty else; with the others nothing is done. Changes made inside are lost.
        """
        if self._options.zero_stage < 3:
            yield
            return
        with self._deepspeed.zero.GatheredParameters(list(self.module.parameters()), modifier_rank=None):
            yield

    def close(self) -> None:
        """Take DeepSpeed's hooks off the model; it trains no more."""
        self.model.destroy()
        if self._is_alone and dist.is_initialized():
            self._deepspeed.comm.destroy_process_group()  # it forgets its groups with it

    # ---- one step

    def _cut(self, batch: Mapping[str, Any], training: bool) -> tuple[list[Batch], list[Any], LabelWeights]:
        """The micro-batches, their labels for a loss function, and what each weighs. Collective."""

        def cut() -> Cut:
            parts = split(batch, self._options.parts)
            check_labels(batch, self._program.module, self._options.loss_fn)
            counts = labels_of(parts, self._options.ignored_label)
            return Cut(parts, counts, fingerprint([training, signature(parts[0])]), content(batch))

        parts, weights = cut_together(self._program, self._device, cut)
        has_loss_fn = self._options.loss_fn is not None
        labels = [part.pop("labels") if has_loss_fn else None for part in parts]
        parts = [self._in_precision(part) for part in parts]
        if self._kind is None and weights.is_open:
            self._kind = self._told(parts, labels, weights)
        weights.kind = self._kind
        return parts, labels, weights

    def _in_precision(self, part: Batch) -> Batch:
        """A micro-batch with its floating-point tensors in the type of the weights."""
        dtype = DTYPES[self._options.settled_precision]
        if dtype is torch.float32:
            return part
        return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, part)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _told(self, parts: list[Batch], labels: list[Any], weights: LabelWeights) -> int:
        """Which labels the loss counts, by an evaluation of this batch; the same on all ranks. Collective."""
        possible, losses = {0, 1}, self._evaluate(parts, labels, None)[1]

        def look() -> None:
            for index, counted in enumerate(losses):
                possible.intersection_update(weights.kinds_of(index, counted))

        on_all(look, self._program)
        mask = torch.tensor([int(kind in possible) for kind in (0, 1)], device=self._device)
        found = all_reduce(mask, self._program.mesh, dist.ReduceOp.MIN).tolist()
        if not any(found):
            raise BuildError(
                f"micro-batches have different numbers of labels, and losses count them differently; {EQUAL_PARTS}"
            )
        return found.index(1)

    def _evaluate(
        self, parts: list[Batch], labels: list[Any], weights: LabelWeights | None
    ) -> tuple[torch.Tensor, list[Counted | None]]:
        """The loss without gradients, and what its micro-batches' are means over, on ranks that compute them."""
        self._counted.clear()
        if self._stage is not None:
            self._begin(self._stage, parts, labels, weights, training=False)
            loss = torch.as_tensor(self.model.eval_batch(steps(len(parts)))).detach().float()
            return loss, self._stage.counted
        self.model.eval()
        each = zip(range(len(parts)), parts, labels, strict=True)
        return self._mean([self._part(*one, weights) for one in each]), self._counted

    def _begin(
        self, stage: RunningStage, parts: list[Batch], labels: list[Any], weights: LabelWeights | None, training: bool
    ) -> None:
        """Make the stage ready for micro-batches like these; DeepSpeed is told where what crosses has another shape."""
        assert self._program.replan is not None
        plan = self._program.replan(training, parts[0])  # the same one, unless the model has changed
        stage.begin(plan, parts, labels, weights)
        if plan is not self._plan:
            self.model.reset_activation_shape()
            self._plan = plan

    def _train(self, parts: list[Batch], labels: list[Any], weights: LabelWeights) -> torch.Tensor:
        self._counted.clear()
        if self._stage is not None:
            self._begin(self._stage, parts, labels, weights, training=True)
            with self._gradients.compared():
                return torch.as_tensor(self.model.train_batch(steps(len(parts)))).detach().float()
        self.model.train()
        self._modes.freeze()
        return self._mean([self._train_part(*each, weights) for each in zip(range(len(parts)), parts, labels, strict=True)])

    def _train_part(self, index: int, part: Batch, labels: Any, weights: LabelWeights) -> torch.Tensor:
        loss = self._part(index, part, labels, weights)
        check_has_gradient(loss)
        with self._gradients.compared() if index == 0 else nullcontext():
            self.model.backward(loss)
        self.model.step()
        return loss.detach()

    def _part(self, index: int, part: Batch, labels: Any, weights: LabelWeights | None) -> torch.Tensor:
        """The loss of a micro-batch, by what it weighs."""
        loss, counted = self._loss(lambda: self.model(**part), labels)
        self._counted.append(counted)
        return loss if weights is None else weights.weighted(index, loss, counted)

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Over this rank's micro-batches and all replicas."""
        mean = torch.stack([loss.detach().float() for loss in losses]).mean()
        dp = self._program.axis_size("dp")
        if dp > 1:
            assert self._program.mesh is not None
            dist.all_reduce(mean, group=self._program.mesh.get_group("dp"))
        return mean / dp


def _restored(group: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    group.clear()
    group.update(before)
    return group


def _mark_shards(module: nn.Module) -> None:
    """What DeepSpeed reads to count the gradients of each shard in the norm, and of what is whole once."""
    for parameter in module.parameters():
        if is_part(parameter):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
