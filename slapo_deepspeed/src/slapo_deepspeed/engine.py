"""Engine of the dialect ``deepspeed``: a program on DeepSpeed's own engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, Program, call_arguments, is_sharded
from slapo_training.batch_engine import MicroBatches
from slapo_training.batches import Batch
from slapo_training.distributed import SingleProcessGroup
from slapo_training.ema import MasterValue
from slapo_training.engines import microbatch_plans, release_others, without_warnings
from slapo_training.losses import LossReduction, check_has_gradient
from slapo_training.model import Piece
from slapo_training.optimizers import ParameterLayout, WholeTensorOptimizer, make_on_all_ranks
from slapo_training.options import is_lr_scheduler

from .checkpoint.save_load import DeepSpeedCheckpoints
from .configuration.config_optimizer import factory_of, is_offloaded
from .configuration.config_validation import check_config
from .configuration.options import DeepSpeedOptions
from .optimizer import whole_tensor_optimizer
from .optimizer.local_tensors import ReducedGradients, unsupported_reason, weight_pieces
from .pipeline import RunningStage, in_pipeline, keep_mode, steps
from .process_state import _deepspeed_private as private
from .process_state.engine_import import MeshGroups, TorchLinear, import_deepspeed, start
from .zero_checks import ExternalReads, UsedParameters


class DeepSpeedEngine(DeepSpeedCheckpoints):
    """Engine that trains or evaluates a model on DeepSpeed's engine.

    Every method is collective over the mesh. An error inside a step closes the engine, because other ranks may wait.

    Attributes:
        model: DeepSpeed's engine.
        module: This rank's stage, or the model; with stage 3 of ZeRO its parameters are empty between steps.
        optimizer: DeepSpeed's optimizer, around a given one; None without an optimizer.
        lr_scheduler: The schedule of the learning rate, or None.
    """

    def __init__(self, program: Program, options: DeepSpeedOptions) -> None:
        super().__init__(program, options)
        self.options = options
        self._device_type = program.mesh.device_type if program.mesh is not None else "cpu"
        self._deepspeed = import_deepspeed(self._device_type)
        self._world, self._linear = start(self._deepspeed), TorchLinear()
        with self._build_context():
            self._config = options.full_config(self._device_type)
            check_config(self._config, options.given, program.axis_size("dp"))
            self._make(program, options)

    def _make(self, program: Program, options: DeepSpeedOptions) -> None:
        self.module = program.stages[program.axis_rank("pp")].module
        self.moves_parameters = self.takes_gradients = options.trains and options.zero_stage > 0
        named = dict(self.module.named_parameters())
        self._check_parameters(self.module, named, replicas=False)
        self._stage = RunningStage(program, self._loss, options.dtype) if len(program.stages) > 1 else None
        self._plan: Program | None = None
        trainable = [parameter for parameter in named.values() if parameter.requires_grad]
        optimizer, rate = self._make_optimizer(program, options)
        pipelined = None if self._stage is None else in_pipeline(program, self._stage, self._modes)
        if pipelined is not None:
            release_others(program, [self.module], lambda x: x.to(options.dtype) if x.is_floating_point() else x)
        private.mark_shards(self.module, None if pipelined is None else program.axis_rank("tp"))
        mpu = MeshGroups(program) if program.mesh is not None and pipelined is None else None
        own = trainable if optimizer is None and options.trains else None
        if options.zero_stage == 3:
            private.align_numbering(program)
        in_turns = optimizer is None or not options.zero_stage or whole_tensor_optimizer.steps_in_turns(optimizer)
        # other ranks may wait inside for a rank that fails
        self._initialize(pipelined or self.module, optimizer, own, rate, mpu)
        self._reads = ExternalReads(self.model, self.module) if options.zero_stage == 3 else None
        whole_tensor_optimizer.bind(self.model, program, in_turns)
        self._turns = whole_tensor_optimizer.MergedStep(self.model)
        if self._stage is not None:
            # DeepSpeed would reuse the memory of a received tensor for activations and gradients of other types
            private.replace_receive_buffers(
                self.model, lambda index, shape, dtype: torch.empty(shape, dtype=dtype, device=self.model.device)
            )
        self._clipped_norm: float | None = None
        self._skipped = 0
        self._counted: list[LossReduction] = []
        named = dict(self.module.named_parameters())
        self._begin_checks(named, private.full_shape)
        self._used = UsedParameters(program, named, options.zero_stage)
        self._hooks.bind(self.module, ReducedGradients(self.model, self._deepspeed, options.zero_stage))
        self._take_step = private.take_over(self.model, self._step, self._clip)

    def _make_optimizer(self, program: Program, options: DeepSpeedOptions) -> tuple[Any, Any]:
        """Return the given optimizer and schedule, or the config's optimizer if it must step whole tensors, or two Nones."""
        is_flat = options.zero_stage > 0  # ZeRO steps flat fp32 ranges
        layout = ParameterLayout.of_engine(program, self.module, torch.float32 if is_flat else None, is_flat=is_flat)
        if options.optimizer is not None or "optimizer" not in self._config:
            return make_on_all_ranks(options, layout, self.module, self._fit)
        factory = factory_of(self._config, any(is_sharded(each) for each in self.module.parameters()))
        optimizer, _ = make_on_all_ranks(replace(options, optimizer=factory), layout, self.module, self._fit)
        if not isinstance(optimizer, WholeTensorOptimizer):
            return None, None
        self._config = {key: value for key, value in self._config.items() if key != "optimizer"}
        return optimizer, None

    def _initialize(self, model: nn.Module, optimizer: Any, own: list[nn.Parameter] | None, rate: Any, mpu: Any) -> None:
        """Let DeepSpeed make its engine; an optimizer of its config gets the parameters ``own``."""
        given = {"optimizer": optimizer, "model_parameters": own, "lr_scheduler": rate, "mpu": mpu, "config": self._config}
        try:
            with without_warnings():
                self.model, self.optimizer, _, self.lr_scheduler = self._deepspeed.initialize(model=model, **given)
        except Exception as err:
            what = next(iter(str(err).splitlines()), "") or type(err).__name__
            raise BuildError(f"DeepSpeed cannot be initialised: {what}") from err
        outer, inner = private.basic_optimizer(self.model), private.inner_optimizer(self.model)
        if outer is not None and inner is not outer and (len(outer.param_groups) > 1 or self.lr_scheduler is not None):
            self.model.destroy()
            raise BuildError(
                f"for ZeRO DeepSpeed makes another {type(outer).__name__}, which has no groups of parameters and no schedule "
                "of its learning rate; use stage 0 of ZeRO, or another optimizer"
            )

    def _clip(self) -> None:
        """Clip gradients as DeepSpeed does without ZeRO, and keep the norm."""
        self._clipped_norm = private.clip_gradients(self.model, self.module.parameters())

    def _step(self, *given: Any) -> None:
        self._run_hooks()
        self._turns.begin()
        self._take_step(*given)

    def _check_trained(self, part: Batch) -> None:
        self._used.check_new()
        size, rows = self.options.configured_rows(self.program.axis_size("dp")), self.options.batch_rows.count(part)
        if size is not None and rows is not None and rows != size[1]:
            raise BuildError(
                f"a micro-batch has {rows} rows, but by {size[0]} in DeepSpeed's config it has {size[1]}; leave it out of the "
                "config, or give batches of that size"
            )

    def _fit(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop groups without a parameter on this rank, as DeepSpeed does, but before a schedule counts the groups."""
        compiled = tuple(private.optimizer_class(kind, is_offloaded=True) for kind in ("adam", "lion"))
        forced = self._config.get("zero_force_ds_cpu_optimizer", True)
        if forced and is_offloaded(self._config) and not isinstance(optimizer, compiled):
            raise BuildError(
                f"offload_optimizer steps DeepSpeed's own optimizers, and optimizer= gave {type(optimizer).__name__}; give the "
                "optimizer in the config, or set zero_force_ds_cpu_optimizer to false there"
            )
        held = [group for group in optimizer.param_groups if group["params"]]
        if not held:
            raise BuildError("optimizer= has no parameter of a rank's stage; give one of all of the model's parameters")
        if len(held) < len(optimizer.param_groups) and is_lr_scheduler(self.options.lr_scheduler):
            raise BuildError(
                "a rank's stage has no parameter of one of the optimizer's groups, which lr_scheduler= was made for; "
                "give a factory, lambda optimizer: ..."
            )
        optimizer.param_groups[:] = held

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    def pieces(self) -> dict[str, Piece]:
        """Return this rank's pieces of parameters, in fp32 if DeepSpeed's optimizer keeps them so, and of buffers. Collective.

        Keys are the first original name of each tensor.
        """
        self._check_weights()
        return weight_pieces(self.model, self.module, self.program, self.options.zero_stage)

    def masters(self) -> Iterator[MasterValue]:
        """Iterate over this rank's ranges of the tensors that DeepSpeed's optimizer steps, and over the buffers."""
        return self._shares().master_values()

    def use_masters(self) -> None:
        """Copy the values of the tensors that DeepSpeed's optimizer steps to the model. Collective."""
        with self._shares().write_context():
            pass

    def averaging_problem(self) -> str:
        return unsupported_reason(self.model, self.module) or super().averaging_problem()

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Gather this rank's parameters inside, for example for ``Schedule.full_state``. Collective.

        Stage 3 of ZeRO leaves parameters empty outside of this context; for other stages the context does nothing. Changes
        made inside are lost.
        """
        if self.options.zero_stage < 3:
            yield
            return
        with self._deepspeed.zero.GatheredParameters(list(self.module.parameters()), modifier_rank=None):
            yield

    def _abandon(self) -> None:
        world = SingleProcessGroup()  # DeepSpeed asks for its rank while it is destroyed
        try:
            self._detach()
            self._linear.release()
        finally:
            world.close()

    def _detach(self) -> None:
        self.model.destroy()
        if self._reads is not None:
            self._reads.close()
            private.forget_modules(self.model.module)
        self._used.close()

    def _release_process(self) -> None:
        self._linear.release()
        self._world.close(self._deepspeed.comm.destroy_process_group)  # DeepSpeed has to forget its groups too

    # ---- one step

    def _evaluate(self, batch: MicroBatches, training: bool = False) -> tuple[torch.Tensor, list[LossReduction]]:
        self._counted.clear()
        if self._stage is not None:
            self._begin(self._stage, batch, training)
            with keep_mode(self.model.module, training):
                loss = torch.as_tensor(self.model.eval_batch(steps(len(batch.parts)))).detach().float().reshape(())
            return loss, self._stage.counted
        self.model.train(training)
        self._modes.restore_frozen()
        with self._reads.check_once(training) if self._reads is not None else nullcontext():
            return self._mean([self._part(index, batch) for index in range(len(batch.parts))]), self._counted

    def _begin(self, stage: RunningStage, batch: MicroBatches, training: bool) -> None:
        """Prepare the stage for these micro-batches; if the shapes of stage inputs change, let DeepSpeed send the new ones."""
        plans = microbatch_plans(self.program, training, batch.parts, "DeepSpeed")
        stage.begin(plans, *batch)
        if plans[0] is not self._plan:
            private.forget_activation_shape(self.model)
            self._plan = plans[0]

    def _train(self, batch: MicroBatches) -> tuple[torch.Tensor, list[LossReduction]]:
        self._skipped = private.num_skipped_steps(self.model)
        if not self.options.zero_stage:
            self.model.zero_grad()  # drop gradients of another engine's backward
        self._counted.clear()
        if self._stage is not None:
            self._begin(self._stage, batch, training=True)
            with self._unused.watch_backwards(), self._gradients.compare_backwards():
                loss = torch.as_tensor(self.model.train_batch(steps(len(batch.parts)))).detach().float()
            self._used.check()
        else:
            self.model.train()
            self._modes.restore_frozen()
            with self._unused.watch_backwards(), self._reads.check_once(True) if self._reads is not None else nullcontext():
                losses = [self._train_part(index, batch) for index in range(len(batch.parts))]
            loss = self._mean(losses)
        norm = self.model.get_global_grad_norm() if self._clipped_norm is None else self._clipped_norm
        self._set_grad_norm(norm)
        return loss, self._counted if self._stage is None else self._stage.counted

    def _has_stepped(self) -> bool:
        return self._skipped == private.num_skipped_steps(self.model)

    def _train_part(self, index: int, batch: MicroBatches) -> torch.Tensor:
        loss = self._part(index, batch)
        check_has_gradient(loss)
        with self._gradients.compare_backwards() if index == 0 else nullcontext():
            self.model.backward(loss)
        self._used.end_micro_batch()
        if index == len(batch.parts) - 1:
            self._used.check()
        self.model.step()
        return loss.detach()

    def _part(self, index: int, batch: MicroBatches) -> torch.Tensor:
        args, kwargs = call_arguments(self.program.module, batch.parts[index])
        loss, counted = self._loss(lambda: self.model(*args, **kwargs), batch.labels[index])
        self._counted.append(counted)
        return loss if batch.weights is None else batch.weights.weight_loss(index, loss, counted)

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean over this rank's micro-batches and all replicas."""
        mean = torch.stack([loss.detach().float() for loss in losses]).mean()
        dp = self.program.axis_size("dp")
        if dp > 1:
            assert self.program.mesh is not None
            dist.all_reduce(mean, group=self.program.mesh.get_group("dp"))
        return mean / dp
