"""The engine of the dialect ``torch``: one rank's part of training a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, Program, all_reduce, compare_across_ranks, mesh_groups, raise_on_all_ranks
from slapo_training.batch_agreement import BatchFacts, check_boundaries, check_contents, check_shapes, content_slots
from slapo_training.batch_arguments import arguments_of
from slapo_training.batches import Batch, check_labels, content, counted_labels, fingerprint, signature, split, variadic
from slapo_training.checkpoint import Saving
from slapo_training.ema import AveragedEngine, MasterValue
from slapo_training.engines import Position
from slapo_training.gradient_hooks import GradientAccess, StepHooks
from slapo_training.losses import NO_GRADIENT, Counted
from slapo_training.model import Modes, Piece
from slapo_training.optimizers import OptimizerMaking, adopted
from slapo_training.optimizers.introspection import groups_in
from slapo_training.step_losses import StepLosses

from .checkpoint import model_state
from .checkpoint.loader import load_checkpoint
from .checkpoint.saver import TorchSaver, Trained
from .device import device_of
from .gradients.ddp import Replicas, check_dense
from .options import Options
from .pipelining.schedules import kind_of, schedule_of
from .step.first_step import TorchFirstStep
from .step.gradient_accumulation import StepResult, run_whole
from .step.local_parameters import Holdings
from .step.merged_stages import merged
from .step.microbatch_weights import LabelCount, Share, labels_of, numbers_of
from .step.stage_call import StageCall, precision
from .step.tensor_parallel_failures import Peers
from .step.training_progress import LossScale, MissedSteps, Progress, step_rate

if TYPE_CHECKING:
    from .fsdp.sharded_replicas import ShardedReplicas

_KEPT_PLANS = 16  # shapes of micro-batches, each with its receive buffers

Runner = Callable[[list[Batch], list[Any], Share], StepResult]
_Given = tuple[tuple[Any, ...], Mapping[str, Any]]
"""A batch as it was given: by position and by keyword."""


class TorchEngine(AveragedEngine):
    """Trains or evaluates this rank's stages, or the whole model.

    Parameters may be frozen and unfrozen between steps, alike on all ranks that hold them; the optimizer is told of unfrozen
    ones by ``add_param_group``. On a rank that had none to train it is made of them in the next step, and its learning rate's
    schedule is brought to where those of the other ranks are.

    Every method is collective over the mesh. An error on one rank is raised on all of them, and the engine can go on with
    the next batch; after one in the optimizer's step, though, the other ranks have stepped: load a checkpoint. An error in the
    model that some tensor-parallel ranks only have ends the engine: these raise it, and the others, which wait for them in a
    collective, when the process of one has ended.

    Attributes:
        program: The program that runs.
        options: What it was built with.
        module: This rank's stage, all its stages in one tree, or the model.
        optimizer: Of this rank's trainable parameters; None when there are none, or none was asked for.
        lr_scheduler: The schedule of its learning rate, or None.
        steps: Batches that were trained, those before the checkpoint that was loaded included.
        timeline: With ``record_timeline``: the forwards (``"F"``) and backwards (``"B"``, or in two parts ``"I"`` and ``"W"``)
            of this rank in its last step, and its messages (``"SEND_F"`` and so on, see ``timeline.MESSAGES``), as dicts of
            ``rank``, ``dp``, ``tp``, ``stage``, ``kind``, ``microbatch``, ``start`` and ``end`` (seconds since the epoch).
        grad_norm: Norm of all gradients of the last step before clipping; None without ``clip``, and where fp16 overflowed.
    """

    def __init__(self, program: Program, options: Options) -> None:
        self.program = program
        self.options = options
        self._mesh = program.mesh
        self._modes = Modes(program.module)
        self._first = TorchFirstStep(program, options)
        self._peers = (
            Peers(program.mesh["tp"].get_group()) if program.mesh is not None and program.axis_size("tp") > 1 else None
        )
        self._plans: dict[Any, Any] = {}
        self._device = device_of(program)
        self._is_alone = not any(mesh_groups(program.mesh))  # and need not wait for its device to give back numbers
        self._meeting = torch.device("cpu") if self._is_alone else self._device
        self.timeline: list[dict[str, Any]] = []
        self.grad_norm: float | None = None
        self._mine = tuple(stage.index for stage in program.stages if program.rank_of(stage.index) == program.axis_rank("pp"))
        self.module: nn.Module = merged([program.stages[index].module for index in self._mine])
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: Any = None
        self.steps = 0
        self._saver = TorchSaver(program)
        self._missed = MissedSteps()
        self._loss_scale = LossScale(options.loss_scale, program.mesh) if options.precision == "fp16" else None
        self._holdings = Holdings(program, self.module)
        self._hooks = StepHooks(program, self.module, options.gradient_hooks == "step")
        self._replicas: Replicas | None = None
        self._shards: ShardedReplicas | None = None
        self._facts = BatchFacts([], [])
        self._content = 0
        self._labels = LabelCount()
        self._differs = False
        self._ignored = options.ignored_label
        self._whole: StageCall | None = None
        self._unused = False
        self._outdated = False
        self._is_closed = False
        self._unchecked: torch.Tensor | int = 0
        autocast = partial(precision, options, self._device.type)
        self._losses = StepLosses(program, options, self._device, self._together, autocast)
        self._scale = 1.0
        try:
            compare_across_ranks(options.agreed(), program.mesh)
            self._holdings.check_same_start()
            if options.data_parallel == "fsdp" and program.axis_size("dp") > 1:
                self._together(self._prepare_shards)
                self._holdings.release_others()
                self._together(self._shard)
                self._together(self._begin_shards)
            self._make_optimizer()
            self._holdings.release_others()
            self._together(self._make_replicas)
            self._hooks.bind(self.module, GradientAccess())
        except Exception:
            self._hooks.give_back()
            self._release()
            if self._shards is not None:
                self._shards.undo()
            raise

    # ---- what users call

    def train_batch(self, /, *args: Any, **batch: Any) -> torch.Tensor:
        """Forward, backward and one optimizer step; see ``Engine.train_batch``.

        Raises:
            BuildError: no optimizer factory was given; the batch cannot be cut into equal micro-batches; the micro-batches or
                ranks have different numbers of labels; the engine was closed; another rank failed.
        """
        if self.options.optimizer is None:
            raise BuildError("this engine was built without an optimizer and only evaluates; pass optimizer= to build")
        self.averages.check_idle("train_batch")
        self.module.zero_grad(set_to_none=True)
        loss = self._step((args, batch), training=True)
        if self._loss_scale is not None and self._loss_scale.overflows(self._holdings.trainable, self._device):
            self.module.zero_grad(set_to_none=True)
            self.grad_norm = None
            self._end_step(is_stepped=False)
            return loss
        self._check_gradients()
        self._reduce()
        if self._hooks.is_active:
            self._together(self._hooks.run)
        self._together(lambda: self._update(loss))
        self._end_step()
        return loss

    def eval_batch(self, /, *args: Any, **batch: Any) -> torch.Tensor:
        """The mean loss in evaluation mode, without gradients; see ``Engine.eval_batch``."""
        return self._step((args, batch), training=False)

    def save(self, path: str | PathLike[str], *, extra: Any = None, wait: bool = True) -> Saving:
        """Write a checkpoint to the directory ``path``, in the place of one that is there.

        Args:
            path: The same on every rank.
            extra: What ``load`` is to give back, plain data and the same on every rank: where the data loader is, say.
            wait: False to return when all that is to be written was copied, and write it while training goes on. The next
                save, load or close waits for it, and raises what kept it from being written.

        Returns:
            The checkpoint that is being written; it is complete after its ``wait()``.
        """
        self.averages.check_idle("save")
        return self._saver.save(path, self._trained(), Position(self.steps, extra), wait)

    def load(self, path: str | PathLike[str]) -> Any:
        """Go on from what ``save`` wrote: exactly on the same layout, and on any other with the same losses.

        Random numbers go on where they were on the same layout alone; on another one dropout draws new ones, derived from the
        checkpoint's and from what each rank was seeded with.

        Returns:
            What was given to ``save`` as ``extra``.

        Raises:
            BuildError: no complete checkpoint, a damaged one, or one of another model or optimizer; nothing has changed.
        """
        self.averages.check_idle("load")
        self._saver.settle()
        with torch.inference_mode(False):  # what is made in it cannot be trained
            self.steps, extra = load_checkpoint(path, self._trained())
        return extra

    def pieces(self) -> dict[str, Piece]:
        """Return this rank's pieces of the parameters and persistent buffers, each under its first original name."""
        return model_state.pieces(self.module)

    def masters(self) -> Iterator[MasterValue]:
        """Iterate over the trained parameters and the buffers of this rank; see ``AveragedEngine.masters``."""
        return model_state.masters(self.module)

    def _trained(self) -> Trained:
        waits = self.options.lr_scheduler is not None and self.lr_scheduler is None
        rate, trains = (self._missed if waits else self.lr_scheduler), self.options.optimizer is not None
        progress = Progress(rate, self._loss_scale, self._labels, trains)
        return Trained(self.program, self.module, self.optimizer, progress, self.averages)

    def close(self) -> None:
        """Take the engine's hooks off the parameters and forget its plans; it only evaluates and saves from now on."""
        self._is_closed = True
        self._hooks.give_back()
        self._release()
        self._saver.close()

    def _release(self) -> None:
        self._plans.clear()
        if self._shards is not None:
            self._shards.follow(())
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None

    # ---- one step

    def _step(self, batch: _Given, training: bool) -> torch.Tensor:
        if self._peers is not None:
            self._peers.begin()
        self._modes.set(training)
        self._outdated = training and self._holdings.is_outdated()
        if self._shards is None:
            return self._run(batch, training)
        loss = self._shards.run(lambda: self._run(batch, training), training)
        self._shards.reduce(self._unused) if training else self._shards.release()
        return loss

    def _run(self, batch: _Given, training: bool) -> torch.Tensor:
        prepared = self._together(lambda: self._prepare(batch, training), self._facts_of)
        if self._outdated:
            self._take_in_unfrozen()
            prepared = self._together(lambda: self._prepare(batch, training), self._facts_of)
        runner, forward_runner, parts, labels = prepared
        scale = self._loss_scale.value if training and self._loss_scale is not None else 1.0
        is_all = len(parts) * self.program.axis_size("dp") == 1
        differs = self._differs and not self._losses.are_whole
        share = Share(len(parts), self._labels.value, differs, scale, is_all)
        if training:
            held = self._shards, self._replicas, self._peers
            share = self._first.look(parts, labels, share, self._device, *held)

        def forward(losses: list[Any]) -> None:
            only_forward = forward_runner() if training else runner
            self._reduced_loss(only_forward(parts, losses, share), False, share)

        def run(losses: list[Any]) -> torch.Tensor:
            result = runner(parts, losses, share)
            result.unused += self._shards.num_unused() if training and self._shards is not None else 0
            loss = self._reduced_loss(result, training, share)
            self._losses.end(training)
            if self.options.record_timeline:
                rank = dist.get_rank() if dist.is_initialized() else 0
                place = {"rank": rank, "dp": self.program.axis_rank("dp"), "tp": self.program.axis_rank("tp")}
                self.timeline = [{**place, **action} for action in result.actions]
            return loss

        if not training:
            return self._losses.evaluate(parts, labels, self.module, forward, run)
        return run(self._losses.train(parts, labels, self.module, forward, scale))

    def _prepare(self, given: _Given, training: bool) -> tuple[Runner, Callable[[], Runner], list[Batch], list[Any]]:
        """Return a runner, a maker of a forward-only runner, micro-batches and labels; touches no other rank."""
        if training and self._is_closed:
            raise BuildError("this engine was closed and trains no more; build another one, or close it later")
        batch = arguments_of(self.program.module, *given, self.options)
        self._content = content(batch) if self._shares_batches else 0
        rows = self.options.batch_rows
        schedule = schedule_of(self.options.pipeline_schedule, self.program, self.options.microbatches, rows.number(batch))
        parts = split(batch, schedule[1], several=variadic(self.program.module), rows=rows)
        is_compared = not self._labels.value or len(parts) > 1 or not self._is_alone  # to count waits for the device
        low, high = counted_labels(parts, self._ignored) if is_compared else ((0, 0), (0, 0))
        shape = fingerprint([training, schedule, *(signature(rows.alike(part)) for part in parts[:1])])
        marks = self._first.marks(parts, training)
        self._facts = BatchFacts([shape, *low, min(marks)], [shape, *high, max(marks)])
        check_labels(batch, self.program.module, self.options.loss_fn, self.options.loss_over is None)
        self._losses.count(parts)
        labels = [part.pop("labels", None) if self.options.loss_fn is not None else None for part in parts]
        forward_runner = partial(self._runner, parts, training, schedule, forward_only=True)
        return self._runner(parts, training, schedule), forward_runner, parts, labels

    def _runner(self, parts: list[Batch], training: bool, schedule: tuple[str, int], forward_only: bool = False) -> Runner:
        backward = training and not forward_only
        if len(self.program.stages) == 1:
            if (call := self._whole) is None:
                call = self._whole = StageCall(self.program.stages[0], None, self.options, self._device.type)
            walk = self._shards.walk if self._shards is not None else None
            return lambda parts, labels, share: run_whole(call, parts, labels, share, backward, self._replicas, walk)
        from .pipeline import StagePlan  # noqa: PLC0415  importing torch.distributed.pipelining costs a second

        key = (training, forward_only, schedule, *map(signature, parts))
        assert self.program.replan is not None
        with torch.set_grad_enabled(training), precision(self.options, self._device.type):
            programs = [self.program.replan(training, part) for part in parts]  # the same, unless the model has changed
        plan: StagePlan | None = self._plans.get(key)
        if plan is None or not plan.serves(programs):
            plan = self._plans[key] = StagePlan(programs, self.options, schedule, self._mine, backward, self._replicas)
            if len(self._plans) > _KEPT_PLANS:
                self._plans.pop(next(iter(self._plans)))
            if self._shards is not None:
                self._shards.follow(module for each in self._plans.values() for module in each.modules)
        inputs = fingerprint([stage.inputs for program in programs for stage in program.stages])
        self._facts = self._facts._replace(inputs=inputs)
        return plan.run

    def _facts_of(self) -> BatchFacts:
        return self._facts

    def _together(self, work: Callable[[], Any], facts: Callable[[], BatchFacts] | None = None) -> Any:
        """Do what one rank can do alone; go on only if all could, and if what they got is of one kind.

        One small reduction where all is well; messages travel only when not.
        """
        error, value = None, None
        try:
            value = work()
        except Exception as err:
            error = err
        mine = facts() if facts is not None and error is None else BatchFacts([], [])
        low, high = ([*numbers, *[0] * (4 - len(numbers))] for numbers in mine[:2])
        compared = (self._content, mine.inputs) if facts is not None else ()
        slots = [slot for each in compared for slot in content_slots(self.program, each, error is None)]
        row = [error is not None, self._outdated, *high, *(-number for number in low), *slots]
        largest = torch.tensor(row, dtype=torch.int64, device=self._meeting)
        failed, self._outdated, *bounds = all_reduce(largest, self._mesh, dist.ReduceOp.MAX).tolist()
        if failed:
            raise_on_all_ranks(error, self._mesh)
        high, low, slots = bounds[:4], [-bound for bound in bounds[4:8]], bounds[8:]
        check_shapes(high[0], low[0])
        check_contents(slots[: len(slots) // 2])
        check_boundaries(slots[len(slots) // 2 :])
        if facts is not None:
            self._differs, self._first.is_uneven = high[1:3] != low[1:3], high[3] != low[3]
            self._labels.value = self._labels.value or float(max(high[1], 1))
        return value

    @property
    def _averages_late(self) -> bool:
        """Return whether gradients are averaged over replicas after the last backward: one in two parts runs no hooks."""
        kind = kind_of(self.options.pipeline_schedule)
        several = len(self.program.stages) > 1 and kind.stages_per_rank != 1
        return self.program.axis_size("dp") > 1 and self._shards is None and several

    @property
    def _shares_batches(self) -> bool:
        """Return whether several ranks have to be given the same batch."""
        return self.program.axis_size("pp") * self.program.axis_size("tp") > 1

    def _take_in_unfrozen(self) -> None:
        """Train with what is trainable now. Collective."""
        if self._shards is not None:
            self._shards.release()
        holdings = Holdings(self.program, self.module)
        holdings.check_same_start()
        self._holdings, self._outdated = holdings, False
        self.averages.include()
        self._make_optimizer()
        self._together(self._make_replicas)
        if self._shards is not None:
            self._shards.gather()

    def _reduced_loss(self, result: StepResult, training: bool, share: Share) -> torch.Tensor:
        """Return the mean loss over micro-batches and replicas, or raise the error of any rank, on every rank. Collective."""
        own = torch.stack(result.losses).sum().double() if result.losses else torch.zeros((), dtype=torch.float64)
        self._ignored = next((told.ignore_index for told in result.counted if isinstance(told, Counted)), self._ignored)
        used = self._shards.used() if self._shards is not None else ()
        unchecked = training and self._holdings.num_unchecked(used)
        if training and result.failure is None:
            result.failure = self._holdings.sparse_gradient(clips=bool(self.options.clip))
        if result.failure is not None and self._peers is not None:
            self._peers.meet(result.failure)
        is_double = any(loss.dtype is torch.float64 for loss in result.losses)
        of_loss = [0.0 if self._is_alone else own.item(), *numbers_of(result.counted)]
        if self.program.axis_rank("tp") != 0:  # tensor-parallel ranks all have the same loss
            of_loss = [0.0] * len(of_loss)
        numbers = [result.failure is not None, result.unused, unchecked, is_double, result.has_gradient, *of_loss]
        row = torch.tensor(numbers, dtype=torch.float64).to(self._meeting)
        failures, unused, self._unchecked, doubles, gradients, reduced, *told = all_reduce(row, self._mesh).tolist()
        self._unused = bool(unused)
        if failures:
            self._start_over()
            raise_on_all_ranks(result.own_failure, self._mesh)
        if training and not gradients:
            self._start_over()
            raise BuildError(NO_GRADIENT)
        try:
            total = own if self._is_alone else reduced  # not waited for
            mean, self._scale, self._labels.value = share.mean(total, labels_of(told), self.program.axis_size("dp"))
        except BuildError:
            self._start_over()
            raise
        return torch.as_tensor(mean, dtype=torch.float64 if doubles else torch.float32, device=self._device)

    def _check_gradients(self) -> None:
        """Refuse a step in which ranks have parts of a gradient and take each for the whole."""
        if self._unchecked:
            try:
                self._holdings.check_gradients(low_precision=self.options.precision != "fp32")
            except Exception:
                self._start_over()
                raise

    def _start_over(self) -> None:
        self.module.zero_grad(set_to_none=True)
        if self._replicas is not None:  # a backward that broke off may have left its bookkeeping incomplete
            self._make_replicas()

    def _reduce(self) -> None:
        """Finish the gradients once the backwards have averaged them over replicas."""
        if self._replicas is not None and self._unused:
            self._replicas.drop_unused()
        if self._averages_late:
            self._holdings.average_over_replicas()
        if self._scale != 1.0:
            self._holdings.scale(self._scale)
        self._holdings.reduce_ties()

    def _clip(self) -> float | None:
        return float(self._holdings.clip(self.options.clip)) if self.options.clip else None

    def _update(self, loss: torch.Tensor) -> None:
        self.grad_norm = self._clip()
        if self.optimizer is not None:
            self.optimizer.step()
            step_rate(self.lr_scheduler, loss)
        elif self.options.lr_scheduler is not None:
            self._missed.add(loss.item())

    def _make_replicas(self) -> None:
        self._release()
        # DistributedDataParallel refuses a stage without trainable parameters, which has nothing to reduce
        if self.program.axis_size("dp") == 1 or not self._holdings.trainable or self.options.optimizer is None:
            return
        check_dense(self.module)
        if not self._averages_late and self._shards is None:
            assert self._mesh is not None
            self._replicas = Replicas(self.module, self._mesh["dp"].get_group())

    def _prepare_shards(self) -> None:
        """Do what may fail, while the model is as it was."""
        given = self.options.optimizer
        if given is not None:
            check_dense(self.module)
        if isinstance(given, torch.optim.Optimizer):
            adopted(given, self.program.module, self.module)

    def _shard(self) -> None:
        from .fsdp.sharded_replicas import ShardedReplicas  # noqa: PLC0415  importing torch.distributed.fsdp costs a second

        self._shards = ShardedReplicas(self.program, self.module, self.options.fsdp_units)

    def _begin_shards(self) -> None:
        given = self.options.optimizer
        assert self._shards is not None
        self._shards.begin(groups_in(given) if isinstance(given, torch.optim.Optimizer) else ())
        self._holdings = Holdings(self.program, self.module)

    def _make_optimizer(self) -> None:
        """Make the optimizer where there is something to train, and the schedule of its learning rate. Collective."""
        given = self.options.optimizer
        if given is None:
            return
        trainable = [] if self.optimizer is not None else self._holdings.trainable
        layout = model_state.layout(self.program, self.module).with_blocks(self.options.optimizer_blocks)
        making = OptimizerMaking(given, layout, self.module, trainable, is_adopted=self._shards is not None)
        self._together(making.begin)
        making.step_whole()
        self._together(lambda: making.finish(self.options.lr_scheduler))
        making.discard_unstepped()
        if making.optimizer is not None:
            self.optimizer, self.lr_scheduler = making.optimizer, making.rate
            self._missed.catch_up(self.lr_scheduler)
