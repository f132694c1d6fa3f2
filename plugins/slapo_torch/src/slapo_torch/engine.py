"""Engine of the dialect ``torch``: one rank's part of training or evaluating a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, Program, compare_across_ranks, mesh_groups, raise_on_all_ranks
from slapo_training.batch_agreement import BatchFingerprints
from slapo_training.batch_arguments import arguments_of
from slapo_training.batches import (
    check_labels,
    content_fingerprint,
    fingerprint,
    label_count_range,
    signature,
    split,
    variadic_argument,
)
from slapo_training.checkpoint import Buffers
from slapo_training.distributed import Ranks, all_reduce
from slapo_training.ema import AveragedEngine, MasterValue
from slapo_training.engines import Position
from slapo_training.gradient_hooks import GradientAccess, StepHooks
from slapo_training.losses import NO_GRADIENT, LabelMean, ReplicaFailedError
from slapo_training.model import Piece, TrainingMode
from slapo_training.optimizers import OptimizerConstruction, adopt_optimizer
from slapo_training.optimizers.probe import groups_in
from slapo_training.step_losses import StepLosses

from .checkpoint import model_state
from .checkpoint.loader import load_checkpoint
from .checkpoint.saver import CheckpointState, TorchSaver
from .gradients.reduction import DDPReplicas, average_gradients, check_dense
from .options import Options
from .pipelining.schedules import kind_of, schedule_for_batch
from .step.engine_step import EngineStep, Runner, TorchFirstStep
from .step.gradient_accumulation import StepResult, run_microbatches
from .step.local_parameters import LocalParameters, device_of, merge_stages
from .step.stage_call import LabelCount, MicroBatchWeight, StageCall, autocast_context, reduction_sums, total_labels
from .step.tensor_parallel_failures import TensorParallelPeers
from .step.training_progress import DeferredLRSteps, LossScale, TrainingProgress, step_lr_scheduler

if TYPE_CHECKING:
    from .fsdp.sharded_replicas import FSDPReplicas

_KEPT_PLANS = 16  # shapes of micro-batches, each with its receive buffers


class TorchEngine(AveragedEngine):
    """Trains or evaluates this rank's stages, or the whole model.

    Parameters may be frozen and unfrozen between steps, alike on all ranks that hold them. Add unfrozen parameters to the
    optimizer by ``add_param_group``. A rank that had no trainable parameters makes its optimizer in the next step, and its
    learning-rate schedule catches up with the schedules of the other ranks.

    Every method is collective over the mesh. An error on one rank is raised on all ranks, and the engine can continue with
    the next batch. After an error in the optimizer's step, load a checkpoint: the other ranks have stepped. An error in the
    model on some tensor-parallel ranks only ends the engine: these ranks raise it at once. The others wait for them in a
    collective and raise it when one of these processes has ended.

    Attributes:
        program: The program that runs.
        options: Options of the engine.
        module: This rank's stage, all its stages in one tree, or the model.
        optimizer: Optimizer of this rank's trainable parameters; None without trainable parameters or without ``optimizer=``.
        lr_scheduler: Learning-rate schedule of the optimizer, or None.
        steps: Number of trained batches, including those before a loaded checkpoint.
        timeline: Actions of this rank in its last step, with ``record_timeline``: forwards (``"F"``), backwards (``"B"``, or
            ``"I"`` and ``"W"`` if split in two) and messages (see ``timeline.MESSAGES``). Each is a dict of ``rank``, ``dp``,
            ``tp``, ``stage``, ``kind``, ``microbatch``, ``start`` and ``end`` (seconds since the epoch).
        grad_norm: Norm of all gradients of the last step before clipping; None without ``clip`` and after an fp16 overflow.
    """

    _saver: TorchSaver

    def __init__(self, program: Program, options: Options) -> None:
        self.program = program
        self.options = options
        self._mesh = program.mesh
        self._modes = TrainingMode(program.module)
        self._first = TorchFirstStep(program, options)
        self._peers: TensorParallelPeers | None = None
        if program.mesh is not None and program.axis_size("tp") > 1:
            self._peers = TensorParallelPeers(program.mesh["tp"].get_group())
        self._plans: dict[Any, Any] = {}
        self._device = device_of(program)
        self._is_single_rank = not any(mesh_groups(program.mesh))  # its loss stays on the device, without a wait
        self._reduction_device = torch.device("cpu") if self._is_single_rank else self._device
        self.timeline: list[dict[str, Any]] = []
        self.grad_norm: float | None = None
        self._own_stages = tuple(
            stage.index for stage in program.stages if program.rank_of(stage.index) == program.axis_rank("pp")
        )
        self.module: nn.Module = merge_stages([program.stages[index].module for index in self._own_stages])
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: Any = None
        self.steps = 0
        self._saver = TorchSaver(program)
        self._deferred_lr_steps = DeferredLRSteps()
        self._loss_scale = LossScale(options.loss_scale, program.mesh) if options.precision == "fp16" else None
        self._parameters = LocalParameters(program, self.module)
        self._hooks = StepHooks(program, self.module, options.gradient_hooks == "step")
        self._replicas: DDPReplicas | None = None
        self._shards: FSDPReplicas | None = None
        self._labels = LabelCount()
        self._ignored = options.ignored_label
        self._stage_call: StageCall | None = None
        self._is_closed = False
        autocast = partial(autocast_context, options, self._device.type)
        self._losses = StepLosses(program, options, self._device, self._on_all_ranks, autocast)
        try:
            compare_across_ranks(options.rank_invariants(), program.mesh)
            self._parameters.check_equal_weights()
            if options.data_parallel == "fsdp" and program.axis_size("dp") > 1:
                self._on_all_ranks(self._prepare_shards)
                self._parameters.free_other_stages()
                self._on_all_ranks(self._shard)
                self._on_all_ranks(self._install_shards)
            self._make_optimizer()
            self._parameters.free_other_stages()
            self._on_all_ranks(self._make_replicas)
            self._hooks.bind(self.module, GradientAccess())
        except Exception:
            self._hooks.give_back()
            self._release()
            if self._shards is not None:
                self._shards.unshard()
            raise

    # ---- what users call

    def train_batch(self, /, *args: Any, **batch: Any) -> torch.Tensor:
        """Run forward, backward and one optimizer step; see ``Engine.train_batch``.

        Raises:
            BuildError: no optimizer factory was given; the batch cannot be split into equal micro-batches; micro-batches or
                ranks have different numbers of labels; the engine is closed; or another rank failed.
        """
        if self.options.optimizer is None:
            raise BuildError("this engine was built without an optimizer and only evaluates; pass optimizer= to build")
        self.averages.check_idle("train_batch")
        self.module.zero_grad(set_to_none=True)
        step, loss = self._run_step(EngineStep(args, batch, training=True))
        if self._loss_scale is not None and self._loss_scale.update(self._parameters.trainable, self._device):
            self.module.zero_grad(set_to_none=True)
            self.grad_norm = None
            self._end_step(is_stepped=False)
            return loss
        self._check_gradients(step)
        self._reduce(step)
        if self._hooks.is_active:
            self._on_all_ranks(self._hooks.run)
        self._on_all_ranks(lambda: self._update(loss))
        self._end_step()
        return loss

    def eval_batch(self, /, *args: Any, **batch: Any) -> torch.Tensor:
        return self._run_step(EngineStep(args, batch, training=False))[1]

    def _prepare_save(
        self, path: str | PathLike[str], position: Position, ranks: Ranks, copies: Buffers | None
    ) -> Callable[[Ranks], None]:
        return self._saver.prepare_save(path, self._checkpoint_state(), position, ranks, copies)

    def _load(self, path: str | PathLike[str]) -> Position:
        with torch.inference_mode(False):  # tensors made in inference mode cannot be trained
            return load_checkpoint(path, self._checkpoint_state())

    def pieces(self) -> dict[str, Piece]:
        return model_state.pieces(self.module)

    def masters(self) -> Iterator[MasterValue]:
        return model_state.master_values(self.module)

    def _checkpoint_state(self) -> CheckpointState:
        waits = self.options.lr_scheduler is not None and self.lr_scheduler is None
        rate, trains = (self._deferred_lr_steps if waits else self.lr_scheduler), self.options.optimizer is not None
        progress = TrainingProgress(rate, self._loss_scale, self._labels, trains)
        return CheckpointState(self.program, self.module, self.optimizer, progress, self.averages)

    def close(self) -> None:
        """Remove the engine's hooks from parameters and free its plans; the engine can still evaluate and save."""
        self._is_closed = True
        self._hooks.give_back()
        self._release()
        self._saver.close()

    def _release(self) -> None:
        self._plans.clear()
        if self._shards is not None:
            self._shards.set_extra_modules(())
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None

    # ---- one step

    def _run_step(self, step: EngineStep) -> tuple[EngineStep, torch.Tensor]:
        """Run forward and, in training, backward; return the step and its loss. Collective."""
        if self._peers is not None:
            self._peers.begin_step()
        self._modes.set(step.training)
        step.is_outdated = step.training and self._parameters.is_outdated()
        if self._shards is None:
            return step, self._run(step)
        loss = self._shards.run(lambda: self._run(step), step.training)
        self._shards.reduce(step.has_unused) if step.training else self._shards.release()
        return step, loss

    def _run(self, step: EngineStep) -> torch.Tensor:
        training = step.training
        self._prepare_on_all_ranks(step)
        if step.is_outdated:
            self._add_unfrozen_parameters()
            step.is_outdated = False
            self._prepare_on_all_ranks(step)
        scale = self._loss_scale.value if training and self._loss_scale is not None else 1.0
        is_single = len(step.parts) * self.program.axis_size("dp") == 1
        differs = step.labels_differ and not self._losses.are_whole
        step.weight = MicroBatchWeight(len(step.parts), self._labels.value, differs, scale, is_single)
        if training:
            step.weight = self._first.check_if_due(step, self._device, self._shards, self._replicas, self._peers)

        def forward(losses: list[Any]) -> None:
            runner = self._runner(step, backward=False) if training else step.runner
            self._reduce_loss(step, runner(step.parts, losses, step.weight), training=False)

        def run(losses: list[Any]) -> torch.Tensor:
            result = step.runner(step.parts, losses, step.weight)
            result.unused += self._shards.num_unused() if training and self._shards is not None else 0
            loss = self._reduce_loss(step, result, training)
            self._losses.end(training)
            if self.options.record_timeline:
                rank = dist.get_rank() if dist.is_initialized() else 0
                place = {"rank": rank, "dp": self.program.axis_rank("dp"), "tp": self.program.axis_rank("tp")}
                self.timeline = [{**place, **action} for action in result.actions]
            return loss

        if not training:
            return self._losses.evaluate(step.parts, step.labels, self.module, forward, run)
        return run(self._losses.train(step.parts, step.labels, self.module, forward, scale))

    def _prepare_on_all_ranks(self, step: EngineStep) -> None:
        largest = step.prepare_on_all_ranks(self._prepare, self.program, self._reduction_device)
        self._labels.value = self._labels.value or float(max(largest, 1))

    def _prepare(self, step: EngineStep) -> None:
        """Split the batch and choose its runner, with no message to other ranks."""
        if step.training and self._is_closed:
            raise BuildError("this engine was closed and trains no more; build another one, or close it later")
        module, options = self.program.module, self.options
        batch = arguments_of(module, step.args, step.kwargs, options)
        step.content = content_fingerprint(batch) if self.program.axis_size("pp") * self.program.axis_size("tp") > 1 else 0
        rows = options.batch_rows
        step.schedule = schedule_for_batch(options.pipeline_schedule, self.program, options.microbatches, rows.count(batch))
        step.parts = parts = split(batch, step.schedule[1], several=variadic_argument(module), rows=rows)
        is_compared = not self._labels.value or len(parts) > 1 or not self._is_single_rank  # counting waits for the device
        low, high = label_count_range(parts, self._ignored) if is_compared else ((0, 0), (0, 0))
        shape = fingerprint(
            [step.training, step.schedule, *(signature(rows.without_variable_sizes(part)) for part in parts[:1])]
        )
        marks = self._first.marks(parts, step.training)
        step.facts = BatchFingerprints([shape, *low, min(marks)], [shape, *high, max(marks)])
        check_labels(batch, module, options.loss_fn, options.loss_over is None)
        self._losses.count(parts)
        step.labels = [part.pop("labels", None) if options.loss_fn is not None else None for part in parts]
        step.runner = self._runner(step, backward=step.training)

    def _runner(self, step: EngineStep, backward: bool) -> Runner:
        if len(self.program.stages) == 1:
            if (call := self._stage_call) is None:
                call = self._stage_call = StageCall(self.program.stages[0], None, self.options, self._device.type)
            runtime = self._shards.unit_runtime if self._shards is not None else None
            return lambda parts, labels, weight: run_microbatches(
                call, parts, labels, weight, backward, self._replicas, runtime
            )
        from .pipeline import StagePlan  # noqa: PLC0415  importing torch.distributed.pipelining costs a second

        key = (step.training, backward, step.schedule, *map(signature, step.parts))
        assert self.program.replan is not None
        with torch.set_grad_enabled(step.training), autocast_context(self.options, self._device.type):
            # the same programs, unless the model has changed
            programs = [self.program.replan(step.training, part) for part in step.parts]
        plan: StagePlan | None = self._plans.get(key)
        if plan is None or not plan.is_plan_of(programs):
            plan = self._plans[key] = StagePlan(
                programs, self.options, step.schedule, self._own_stages, backward, self._replicas
            )
            if len(self._plans) > _KEPT_PLANS:
                self._plans.pop(next(iter(self._plans)))
            if self._shards is not None:
                self._shards.set_extra_modules(module for each in self._plans.values() for module in each.modules)
        inputs = fingerprint([stage.inputs for program in programs for stage in program.stages])
        step.facts = step.facts._replace(inputs=inputs)
        return plan.run

    def _on_all_ranks(self, work: Callable[[], Any]) -> Any:
        """Run what one rank can do alone; go on only if no rank failed. Collective.

        Without an error there is one small reduction; messages are exchanged only after an error.
        """
        error, value = None, None
        try:
            value = work()
        except Exception as err:
            error = err
        failed = torch.tensor([error is not None], dtype=torch.int64, device=self._reduction_device)
        if any(all_reduce(failed, self._mesh, dist.ReduceOp.MAX).tolist()):
            raise_on_all_ranks(error, self._mesh)
        return value

    @property
    def _averages_after_backward(self) -> bool:
        """True if gradients are averaged over replicas after the last backward: split backwards run no DDP hooks."""
        kind = kind_of(self.options.pipeline_schedule)
        several = len(self.program.stages) > 1 and kind.stages_per_rank != 1
        return self.program.axis_size("dp") > 1 and self._shards is None and several

    def _add_unfrozen_parameters(self) -> None:
        """Train the parameters that are trainable now. Collective."""
        if self._shards is not None:
            self._shards.release()
        parameters = LocalParameters(self.program, self.module)
        parameters.check_equal_weights()
        self._parameters = parameters
        self.averages.include()
        self._make_optimizer()
        self._on_all_ranks(self._make_replicas)
        if self._shards is not None:
            self._shards.gather()

    def _reduce_loss(self, step: EngineStep, result: StepResult, training: bool) -> torch.Tensor:
        """Return the mean loss over micro-batches and replicas, or raise any rank's error on every rank. Collective."""
        own = torch.stack(result.losses).sum().double() if result.losses else torch.zeros((), dtype=torch.float64)
        self._ignored = next((each.ignore_index for each in result.counted if isinstance(each, LabelMean)), self._ignored)
        used = self._shards.used_ids() if self._shards is not None else ()
        unchecked = training and self._parameters.num_unchecked(used)
        if training and result.failure is None:
            result.failure = self._parameters.sparse_gradient(clips=bool(self.options.clip))
        if result.failure is not None and self._peers is not None:
            self._peers.synchronize_failure(result.failure)
        is_double = any(loss.dtype is torch.float64 for loss in result.losses)
        of_loss = [0.0 if self._is_single_rank else own.item(), *reduction_sums(result.counted)]
        if self.program.axis_rank("tp") != 0:  # all tensor-parallel ranks have the same loss
            of_loss = [0.0] * len(of_loss)
        numbers = [result.failure is not None, result.unused, unchecked, is_double, result.has_gradient, *of_loss]
        row = torch.tensor(numbers, dtype=torch.float64).to(self._reduction_device)
        failures, unused, unchecked, doubles, gradients, reduced, *sums = all_reduce(row, self._mesh).tolist()
        step.has_unused, step.has_unchecked = bool(unused), bool(unchecked)
        if failures:
            self._reset_gradients()
            # where another replica failed, this rank only reports that one's error
            raise_on_all_ranks(None if isinstance(result.failure, ReplicaFailedError) else result.failure, self._mesh)
        if training and not gradients:
            self._reset_gradients()
            raise BuildError(NO_GRADIENT)
        try:
            total = own if self._is_single_rank else reduced  # stays on the device, without a wait
            replicas = self.program.axis_size("dp")
            mean, step.gradient_factor, self._labels.value = step.weight.batch_mean(total, total_labels(sums), replicas)
        except BuildError:
            self._reset_gradients()
            raise
        return torch.as_tensor(mean, dtype=torch.float64 if doubles else torch.float32, device=self._device)

    def _check_gradients(self, step: EngineStep) -> None:
        """Refuse a step in which tensor-parallel ranks have partial gradients of a parameter that each holds whole."""
        if step.has_unchecked:
            try:
                self._parameters.check_gradients(low_precision=self.options.precision != "fp32")
            except Exception:
                self._reset_gradients()
                raise

    def _reset_gradients(self) -> None:
        self.module.zero_grad(set_to_none=True)
        if self._replicas is not None:  # DDP's state is incomplete after a failed backward
            self._make_replicas()

    def _reduce(self, step: EngineStep) -> None:
        """Finish the gradients after the last backward: unused parameters, replicas, scale and ties."""
        if self._replicas is not None and step.has_unused:
            self._replicas.clear_unused_gradients()
        if self._averages_after_backward:
            assert self._mesh is not None
            average_gradients(self._parameters.trainable, self._mesh["dp"].get_group())
        if step.gradient_factor != 1.0:
            self._parameters.scale(step.gradient_factor)
        self._parameters.reduce_ties()

    def _update(self, loss: torch.Tensor) -> None:
        self.grad_norm = float(self._parameters.clip(self.options.clip)) if self.options.clip else None
        if self.optimizer is not None:
            self.optimizer.step()
            step_lr_scheduler(self.lr_scheduler, loss)
        elif self.options.lr_scheduler is not None:
            self._deferred_lr_steps.add(loss.item())

    def _make_replicas(self) -> None:
        self._release()
        # DistributedDataParallel refuses modules without trainable parameters; there is nothing to reduce
        if self.program.axis_size("dp") == 1 or not self._parameters.trainable or self.options.optimizer is None:
            return
        check_dense(self.module)
        if not self._averages_after_backward and self._shards is None:
            assert self._mesh is not None
            self._replicas = DDPReplicas(self.module, self._mesh["dp"].get_group())

    def _prepare_shards(self) -> None:
        """Run the checks of FSDP that may fail, before the model changes."""
        given = self.options.optimizer
        if given is not None:
            check_dense(self.module)
        if isinstance(given, torch.optim.Optimizer):
            adopt_optimizer(given, self.program.module, self.module)

    def _shard(self) -> None:
        from .fsdp.sharded_replicas import FSDPReplicas  # noqa: PLC0415  importing torch.distributed.fsdp costs a second

        self._shards = FSDPReplicas(self.program, self.module, self.options.fsdp_units)

    def _install_shards(self) -> None:
        given = self.options.optimizer
        assert self._shards is not None
        self._shards.install_shards(groups_in(given) if isinstance(given, torch.optim.Optimizer) else ())
        self._parameters = LocalParameters(self.program, self.module)

    def _make_optimizer(self) -> None:
        """Make the optimizer and its learning-rate schedule if this rank has trainable parameters. Collective."""
        given = self.options.optimizer
        if given is None:
            return
        trainable = [] if self.optimizer is not None else self._parameters.trainable
        layout = model_state.parameter_layout(self.program, self.module).with_blocks(self.options.optimizer_blocks)
        making = OptimizerConstruction(given, layout, self.module, trainable, is_adopted=self._shards is not None)
        self._on_all_ranks(making.begin)
        making.step_whole()
        self._on_all_ranks(lambda: making.finish(self.options.lr_scheduler))
        making.discard_unstepped()
        if making.optimizer is not None:
            self.optimizer, self.lr_scheduler = making.optimizer, making.rate
            self._deferred_lr_steps.catch_up(self.lr_scheduler)
