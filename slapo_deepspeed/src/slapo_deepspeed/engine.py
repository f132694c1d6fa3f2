"""The engine of the dialect ``deepspeed``: a program on DeepSpeed's own engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, Program, call_arguments, compare_across_ranks, is_sharded
from slapo_training.batch_engine import BatchEngine, MicroBatches
from slapo_training.batches import Batch
from slapo_training.checkpoint import Saver, Saving
from slapo_training.distributed import OwnWorld, on_all
from slapo_training.ema import MasterValue
from slapo_training.engines import (
    GradientComparison,
    Position,
    UnusedParameters,
    check_same_start,
    holds_copies,
    microbatch_plans,
    parameter_ownership,
    release_others,
    stale_engines,
    without_warnings,
)
from slapo_training.gradient_hooks import StepHooks
from slapo_training.losses import CountedLoss, LossReduction, check_has_gradient
from slapo_training.model import Modes, Piece
from slapo_training.optimizers import WholeTensorOptimizer, made_on_all
from slapo_training.options import is_rate

from .checkpoint import save_load
from .configuration.config_optimizer import factory_of, is_offloaded
from .configuration.config_validation import check_config
from .configuration.options import DTYPES, DeepSpeedOptions
from .optimizer import master_weights, whole_tensor_optimizer
from .optimizer.local_tensors import Shares, stepping, why_not
from .optimizer.reduced_gradients import ReducedGradients
from .pipeline import RunningStage, in_pipeline, staying, steps
from .process_state.engine_import import TorchLinear, forget_modules, imported, number_alike, start
from .process_state.process_groups import MeshGroups, whole_shape
from .zero.external_parameters import ExternalReads
from .zero.gradient_order import UsedParameters


class DeepSpeedEngine(BatchEngine):
    """Trains or evaluates a model on DeepSpeed's engine.

    Every method is collective over the mesh. An error within a step, which its other ranks may wait for, ends the engine.

    Attributes:
        model: DeepSpeed's engine.
        module: This rank's stage, or the model; with stage 3 of ZeRO its parameters are empty between steps.
        optimizer: DeepSpeed's, around the one given; None where there is none.
        lr_scheduler: The schedule of its learning rate, or None.
        options: What it was built with.
    """

    def __init__(self, program: Program, options: DeepSpeedOptions) -> None:
        dtype = DTYPES[options.settled_precision]
        super().__init__(program, options, options.parts, dtype, options.trains)
        self.options = options
        self._device_type = program.mesh.device_type if program.mesh is not None else "cpu"
        self._saver = Saver(program)
        compare_across_ranks(options.agreed(), program.mesh)
        self._deepspeed = imported(self._device_type)
        stale_engines.abandon_stale()
        self._world, self._linear = start(self._deepspeed), TorchLinear()
        try:
            self._config = options.settled(self._device_type)
            check_config(self._config, options.given, program.axis_size("dp"))
            self._make(program, options, dtype)
        except BaseException:
            if hasattr(self, "_hooks"):
                self._hooks.give_back()
            self._linear.leave()
            self._leave_world()
            raise
        stale_engines.add(self)
        parameter_ownership.add(self)

    def _make(self, program: Program, options: DeepSpeedOptions, dtype: torch.dtype) -> None:
        self.module: nn.Module = program.stages[program.axis_rank("pp")].module
        _mark_shards(self.module)
        self.moves_parameters = self.takes_gradients = options.trains and options.zero_stage > 0
        parameter_ownership.check_free(dict(self.module.named_parameters()) if options.trains else {}, self.takes_gradients)
        self._hooks = StepHooks(program, self.module, options.gradient_hooks == "step")
        self._modes = Modes(program.module)
        self._loss = CountedLoss(options.loss_fn, options.output_loss)
        self._stage = RunningStage(program, self._loss, dtype) if len(program.stages) > 1 else None
        self._plan: Program | None = None
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        check_same_start(program, dict(self.module.named_parameters()), replicas=False)
        optimizer, rate = self._made(program, options)
        pipelined = None if self._stage is None else in_pipeline(program, self._stage, self._modes)
        if pipelined is not None:
            release_others(program, [self.module], lambda x: x.to(dtype) if x.is_floating_point() else x)
        mpu = MeshGroups(program) if program.mesh is not None and pipelined is None else None
        own = trainable if optimizer is None and options.trains else None
        if options.zero_stage == 3:
            number_alike(program)
        in_turns = optimizer is None or not options.zero_stage or whole_tensor_optimizer.steps_in_turns(optimizer)
        self._initialize(pipelined or self.module, optimizer, own, rate, mpu)  # others may wait within for a rank that fails
        self._reads = ExternalReads(self.model, self.module) if options.zero_stage == 3 else None
        whole_tensor_optimizer.bind(self.model, program, in_turns)
        self._turns = whole_tensor_optimizer.Turns(self.model)
        if self._stage is not None:
            self.model._allocate_or_extend_buffers = self._buffer
        self._clipped_norm: float | None = None
        self._skipped = 0
        self.model.clip_fp32_gradients = self._clip
        self._counted: list[LossReduction] = []
        named = dict(self.module.named_parameters())
        self._remember_trained(named)
        self._gradients = GradientComparison(program, named, whole_shape)
        self._unused = UnusedParameters(program, named, options.target)
        self._used = UsedParameters(program, named, options.zero_stage)
        self._hooks.bind(self.module, ReducedGradients(self.model, self._deepspeed, options.zero_stage))
        self._take_step, self.model._take_model_step = self.model._take_model_step, self._step

    def _made(self, program: Program, options: DeepSpeedOptions) -> tuple[Any, Any]:
        """The optimizer and schedule given, or those of DeepSpeed's config that step whole tensors of parts."""
        layout = whole_tensor_optimizer.layout(program, self.module, options.zero_stage)
        if options.optimizer is not None or "optimizer" not in self._config:
            return made_on_all(options, layout, self.module, self._fit)
        factory = factory_of(self._config, any(is_sharded(each) for each in self.module.parameters()))
        optimizer, _ = made_on_all(replace(options, optimizer=factory), layout, self.module, self._fit)
        if not isinstance(optimizer, WholeTensorOptimizer):
            return None, None
        self._config = {key: value for key, value in self._config.items() if key != "optimizer"}
        return optimizer, None

    def _initialize(self, model: nn.Module, optimizer: Any, own: list[nn.Parameter] | None, rate: Any, mpu: Any) -> None:
        """Let DeepSpeed make its engine, and of its config's an optimizer of ``own``."""
        given = {"optimizer": optimizer, "model_parameters": own, "lr_scheduler": rate, "mpu": mpu, "config": self._config}
        try:
            with without_warnings():
                self.model, self.optimizer, _, self.lr_scheduler = self._deepspeed.initialize(model=model, **given)
        except Exception as err:
            what = next(iter(str(err).splitlines()), "") or type(err).__name__
            raise BuildError(f"DeepSpeed cannot be initialised: {what}") from err
        outer, inner = self.model.basic_optimizer, stepping(self.model)
        if outer is not None and inner is not outer and (len(outer.param_groups) > 1 or self.lr_scheduler is not None):
            self.model.destroy()
            raise BuildError(
                f"for ZeRO DeepSpeed makes another {type(outer).__name__}, which has no groups of parameters and no schedule "
                "of its learning rate; use stage 0 of ZeRO, or another optimizer"
            )

    def _buffer(self, index: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for one received tensor. DeepSpeed would give activations and gradients the same, whatever their types."""
        return torch.empty(shape, dtype=dtype, device=self.model.device)

    def _clip(self) -> None:
        """Clip as DeepSpeed does without ZeRO, but keep the norm."""
        from deepspeed.runtime.utils import clip_grad_norm_

        norm = clip_grad_norm_(self.module.parameters(), self.model.gradient_clipping(), mpu=self.model.mpu)
        self._clipped_norm = float(norm)

    def _step(self, *given: Any) -> None:
        """Run the user's gradient hooks, and let DeepSpeed step."""
        if self._hooks.is_active:
            on_all(self._hooks.run, self.program)
        self._turns.begin()
        self._take_step(*given)

    def _check_trained(self, part: Batch) -> None:
        self._used.check_new()
        size, rows = self.options.configured_rows(self.program.axis_size("dp")), self.options.batch_rows.number(part)
        if size is not None and rows is not None and rows != size[1]:
            raise BuildError(
                f"a micro-batch has {rows} rows, but by {size[0]} in DeepSpeed's config it has {size[1]}; leave it out of the "
                "config, or give batches of that size"
            )

    def _fit(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave out groups without a parameter of this rank, as DeepSpeed does, but before a schedule counts them."""
        if self._wants_its_own(optimizer):
            raise BuildError(
                f"offload_optimizer steps DeepSpeed's own optimizers, and optimizer= gave {type(optimizer).__name__}; give the "
                "optimizer in the config, or set zero_force_ds_cpu_optimizer to false there"
            )
        held = [group for group in optimizer.param_groups if group["params"]]
        if not held:
            raise BuildError("optimizer= has no parameter of a rank's stage; give one of all of the model's parameters")
        if len(held) < len(optimizer.param_groups) and is_rate(self.options.lr_scheduler):
            raise BuildError(
                "a rank's stage has no parameter of one of the optimizer's groups, which lr_scheduler= was made for; "
                "give a factory, lambda optimizer: ..."
            )
        optimizer.param_groups[:] = held

    def _wants_its_own(self, optimizer: torch.optim.Optimizer) -> bool:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.lion import DeepSpeedCPULion

        forced = self._config.get("zero_force_ds_cpu_optimizer", True)
        return bool(forced) and is_offloaded(self._config) and not isinstance(optimizer, DeepSpeedCPUAdam | DeepSpeedCPULion)

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return torch.device(self.model.device)

    def save(self, path: str | PathLike[str], *, extra: Any = None, wait: bool = True) -> Saving:
        """Write a checkpoint of DeepSpeed's, and the random states, to the directory ``path``, in the place of one there.

        Args:
            path: The same on every rank.
            extra: What ``load`` is to give back, plain data and the same on every rank: where the data loader is, say.
            wait: False to return when all that is to be written was copied, and write it while training goes on. The next
                save, load or close waits for it, and raises what kept it from being written.

        Returns:
            The checkpoint that is being written; it is complete after its ``wait()``.
        """
        self._check_weights()
        self.averages.check_idle("save")
        given = self.model, self.module, path, self.program, self.options.zero_stage, Position(self.steps, extra)
        return self._saver.write(lambda ranks, copies: save_load.prepared(*given, ranks, copies, self.averages), wait)

    def load(self, path: str | PathLike[str]) -> Any:
        """Go on exactly from what ``save`` wrote.

        Also at any other layout and with another stage of ZeRO, by original names; random numbers are then new ones, derived
        from the checkpoint's.

        Returns:
            What was given to ``save`` as ``extra``.

        Raises:
            BuildError: no complete checkpoint, or one of another model or layout, and nothing has changed; or DeepSpeed cannot
                read it to its end, and the engine does nothing before another one is loaded.
        """
        self._check_open()
        self.averages.check_idle("load")
        self._saver.settle()
        given = self.model, self.module, path, self.program, self.options.zero_stage
        found = save_load.checked(*given, self.averages)
        with self._reading():
            save_load.load(self.model, self.module, found, self.program)
        self.averages.put(found.averages)
        self.steps, extra = found.beside.position
        return extra

    def pieces(self) -> dict[str, Piece]:
        """Return this rank's pieces of parameters, in fp32 where DeepSpeed's optimizer has them, and of buffers. Collective.

        Each stands under its first original name.
        """
        self._check_weights()
        return master_weights.pieces(self.model, self.module, self.program, self.options.zero_stage)

    def masters(self) -> Iterator[MasterValue]:
        """Iterate over this rank's ranges of what DeepSpeed's optimizer steps, and the buffers."""
        return master_weights.values(self.model, self.module, self.program)

    def use_masters(self) -> None:
        """Let the model run with the values in what DeepSpeed's optimizer steps. Collective."""
        shares = Shares(self.model, self.module, self.program)
        shares.begin()
        shares.put_back()

    def why_not_averaged(self) -> str:
        """Return what of this engine cannot be averaged."""
        return why_not(self.model, self.module) or ("an engine without an optimizer" if stepping(self.model) is None else "")

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Let this rank have its parameters whole inside, as ``Schedule.full_state`` takes them. Collective.

        With stage 3 of ZeRO they are empty else; with the others nothing is done. Changes made inside are lost.
        """
        if self.options.zero_stage < 3:
            yield
            return
        with self._deepspeed.zero.GatheredParameters(list(self.module.parameters()), modifier_rank=None):
            yield

    def close(self) -> None:
        """Wait for a checkpoint, and take DeepSpeed's hooks off the model; it trains no more."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._saver.close()
        finally:
            self._take_off()
            self._leave_world()

    def abandon(self) -> None:
        """Take DeepSpeed's hooks off the model, of an engine whose process group is gone."""
        if self._is_closed:
            return
        self._is_closed, world = True, OwnWorld()  # DeepSpeed asks for a rank as it lets go
        try:
            self._take_off()
        finally:
            if world.leave():
                dist.destroy_process_group()

    def _take_off(self) -> None:
        self._hooks.give_back()
        self.model.destroy()
        if self._reads is not None:
            self._reads.close()
            forget_modules(self.model.module)
        self._used.close()
        self._linear.leave()

    def _leave_world(self) -> None:
        """Give back the process group of this process alone, if there is one."""
        if self._world.leave():
            self._deepspeed.comm.destroy_process_group()  # it forgets its groups with it

    # ---- one step

    def _evaluate(self, batch: MicroBatches, training: bool = False) -> tuple[torch.Tensor, list[LossReduction]]:
        self._counted.clear()
        if self._stage is not None:
            self._begin(self._stage, batch, training)
            with staying(self.model.module, training):
                loss = torch.as_tensor(self.model.eval_batch(steps(len(batch.parts)))).detach().float().reshape(())
            return loss, self._stage.counted
        self.model.train(training)
        self._modes.freeze()
        with self._reads.watched(training) if self._reads is not None else nullcontext():
            return self._mean([self._part(index, batch) for index in range(len(batch.parts))]), self._counted

    def _begin(self, stage: RunningStage, batch: MicroBatches, training: bool) -> None:
        """Make the stage ready for micro-batches like these; DeepSpeed is told where what crosses has another shape."""
        plans = microbatch_plans(self.program, training, batch.parts, "DeepSpeed")
        stage.begin(plans, *batch)
        if plans[0] is not self._plan:
            self.model.reset_activation_shape()
            self._plan = plans[0]

    def _train(self, batch: MicroBatches) -> tuple[torch.Tensor, list[LossReduction]]:
        self._skipped = self.model.skipped_steps
        if not self.options.zero_stage:
            self.model.zero_grad()  # another engine's backward may have made some
        self._counted.clear()
        if self._stage is not None:
            self._begin(self._stage, batch, training=True)
            with self._unused.watched(), self._gradients.compared():
                loss = torch.as_tensor(self.model.train_batch(steps(len(batch.parts)))).detach().float()
            self._used.check()
        else:
            self.model.train()
            self._modes.freeze()
            with self._unused.watched(), self._reads.watched(True) if self._reads is not None else nullcontext():
                losses = [self._train_part(index, batch) for index in range(len(batch.parts))]
            loss = self._mean(losses)
        norm = self.model.get_global_grad_norm() if self._clipped_norm is None else self._clipped_norm
        self.grad_norm = None if norm is None or holds_copies(self.program) else float(norm)
        return loss, self._counted if self._stage is None else self._stage.counted

    def _has_stepped(self) -> bool:
        return bool(self._skipped == self.model.skipped_steps)

    def _train_part(self, index: int, batch: MicroBatches) -> torch.Tensor:
        loss = self._part(index, batch)
        check_has_gradient(loss)
        with self._gradients.compared() if index == 0 else nullcontext():
            self.model.backward(loss)
        self._used.end_micro_batch()
        if index == len(batch.parts) - 1:
            self._used.check()
        self.model.step()
        return loss.detach()

    def _part(self, index: int, batch: MicroBatches) -> torch.Tensor:
        """The loss of a micro-batch, by what it weighs."""
        args, kwargs = call_arguments(self.program.module, batch.parts[index])
        loss, counted = self._loss(lambda: self.model(*args, **kwargs), batch.labels[index])
        self._counted.append(counted)
        return loss if batch.weights is None else batch.weights.weighted(index, loss, counted)

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Over this rank's micro-batches and all replicas."""
        mean = torch.stack([loss.detach().float() for loss in losses]).mean()
        dp = self.program.axis_size("dp")
        if dp > 1:
            assert self.program.mesh is not None
            dist.all_reduce(mean, group=self.program.mesh.get_group("dp"))
        return mean / dp


def _mark_shards(module: nn.Module) -> None:
    """Set what DeepSpeed reads to count the gradients of each shard in the norm, and those of replicated parameters once."""
    for parameter in module.parameters():
        if is_sharded(parameter):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
