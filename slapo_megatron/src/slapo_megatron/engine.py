"""Engine of the dialect ``megatron``: a program on Megatron-Core's data parallelism, schedules and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, Program, shard_spec
from slapo_training.batch_engine import MicroBatches
from slapo_training.distributed import all_reduce
from slapo_training.ema import MasterValue, master_values
from slapo_training.engines import microbatch_plans, release_others, without_warnings
from slapo_training.losses import LossReduction
from slapo_training.model import Piece, piece_of
from slapo_training.optimizers import make_on_all_ranks
from slapo_training.stage_forward import enumerate_micro_batches

from .checkpoint.save_load import MegatronCheckpoints
from .configuration.limits import ANOTHER_OPTIMIZER, is_shared_out
from .configuration.options import MegatronOptions
from .optimizer.local_tensors import LocalTensors
from .optimizer.optimizer_wrappers import (
    ReducedGradients,
    bind_masters,
    initialize_state,
    megatron_optimizer,
    optimizer_config,
    whole_layout,
)
from .pipeline import Borders, RunningStage, borders, ties_of
from .process_state import _megatron_private as private
from .process_state.cpu_mode import mode_of
from .process_state.process_groups import ParallelState, config_of, device_of


class MegatronEngine(MegatronCheckpoints):
    """Engine that trains or evaluates a model on Megatron-Core.

    Every method is collective over the mesh. An error inside a step closes the engine, because other ranks may wait.

    Attributes:
        model: Megatron's ``DistributedDataParallel`` around each stage of this rank.
        module: This rank's stage, or the model; with several stages a list of them.
        optimizer: Megatron's optimizer, around a given one; None without an optimizer.
        lr_scheduler: The schedule of the learning rate, or None.
        has_stepped: True if the optimizer has stepped, here or before the loaded checkpoint.
    """

    def __init__(self, program: Program, options: MegatronOptions) -> None:
        super().__init__(program, options)
        self._device_type = device_of(program)
        own = [s.index for s in program.stages if program.rank_of(s.index) == program.axis_rank("pp")]
        self._state = ParallelState(program, len(own), options.timeout_minutes)
        self.groups = self._state.groups
        with self._build_context():
            chunks = nn.ModuleList(program.stages[index].module for index in own)
            self.module = chunks[0] if len(own) == 1 else chunks
            self.moves_parameters = options.trains
            self._check_parameters(chunks, _parameters_by_name(chunks))
            optimizer, self.lr_scheduler = make_on_all_ranks(options, whole_layout(options, program, chunks), chunks, self._fit)
            with self._call_context():
                self._make(program, own, chunks, optimizer)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert a float32 tensor to the type of the weights; return any other tensor as it is."""
        return tensor.to(self.options.dtype) if tensor.dtype is torch.float32 else tensor

    @contextmanager
    def _call_context(self) -> Iterator[None]:
        with mode_of(self._device_type), without_warnings():
            yield

    def _make(self, program: Program, own: list[int], chunks: nn.ModuleList, optimizer: torch.optim.Optimizer | None) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        private.complete_imports()
        pp, options = program.axis_size("pp"), self.options
        private.mark_shards(chunks)
        optimizer_settings = optimizer_config(options)
        self.config = self._transformer_config(program, len(own))
        chunks._apply(self._cast)  # type: ignore[no-untyped-call]
        self._ties = ties_of(program, self._state)
        if len(program.stages) > 1:
            release_others(program, chunks, self._cast)
        self._stages: list[RunningStage] = []
        for index in own:
            self._stages.append(RunningStage(program, index, self._loss, self.config, self._stages))
        self.model = [self._wrap_ddp(stage, number) for number, stage in enumerate(self._stages)]
        self.config.finalize_model_grads_func = self._finalize
        if options.section("ddp").get("overlap_grad_reduce"):
            waits = [chunk.no_sync for chunk in self.model]
            self.config.no_sync_func = waits if len(waits) > 1 else waits[0]
        if optimizer is not None:
            self.optimizer = private.wrap_optimizer(optimizer, optimizer_settings, self.model, self.groups, initialize_state)
            bind_masters(optimizer)
        else:
            self.optimizer = megatron_optimizer(optimizer_settings, self.model, self.groups) if options.trains else None
        self._run = get_forward_backward_func(pp_size=pp, vp_size=len(own) if len(own) > 1 else None)
        self._sender = private.communicator(self.groups.pp, self.config)
        self._begin_checks(_parameters_by_name(chunks))
        self._hooks.bind(chunks, ReducedGradients(program, options, self.model))
        self._plan: tuple[Program, Borders] | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self._device_type == "cpu" else torch.cuda.current_device())

    def _transformer_config(self, program: Program, chunks: int) -> Any:
        from megatron.core.transformer import TransformerConfig

        given = self.options.section("transformer")
        tp, pp = program.axis_size("tp"), program.axis_size("pp")
        # placeholders: the program need not be a transformer, and Megatron's schedules read only the settings below
        given = {"num_layers": len(program.stages), "hidden_size": tp, "num_attention_heads": tp, **given}
        if chunks > 1:
            given = {"overlap_p2p_comm": True, "batch_p2p_comm": False, **given}
        return config_of(
            TransformerConfig,
            {
                "use_cpu_initialization": True,
                **given,
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
                "params_dtype": self.options.dtype,
                "pipeline_dtype": self.options.dtype,
                "bf16": self.options.precision == "bf16",
            },
        )

    def _fit(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop frozen parameters from the optimizer, and refuse optimizers that Megatron does not support.

        The check is made here because the type of a factory's optimizer is not known earlier.
        """
        if self.options.distributed_optimizer and not is_shared_out(optimizer):
            raise ANOTHER_OPTIMIZER.error(self.options.target)
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.module.named_parameters() if self.options.clip else ():
            if parameter.requires_grad and id(parameter) not in stepped:
                raise BuildError(
                    f"the optimizer leaves out {name!r}, whose gradient Megatron would not count in the norm that clip= "
                    "limits; freeze it, let the optimizer have it, or use target='torch'"
                )

    def _wrap_ddp(self, stage: RunningStage, number: int) -> Any:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        given = {"grad_reduce_in_fp32": True, **self.options.section("ddp")}
        given["use_distributed_optimizer"] = self.options.distributed_optimizer
        config = config_of(DistributedDataParallelConfig, given)
        return DistributedDataParallel(self.config, config, stage, disable_bucketing=number > 0, pg_collection=self.groups)

    def pieces(self) -> dict[str, Piece]:
        """Return this rank's pieces of the parameters, in fp32 if they are trained, and of persistent buffers. Collective.

        Keys are the first original name of each tensor.
        """
        self._check_weights()
        held = LocalTensors(self.program)
        kept = self.optimizer_state(held)
        masters = {} if kept is None else kept.masters()
        return {key: piece_of(masters.get(key, tensor), shard_spec(tensor)) for key, tensor in held.tensors.items()}

    def masters(self) -> Iterator[MasterValue]:
        """Iterate over this rank's parts of the tensors that Megatron's optimizer steps, and over the buffers."""
        held = LocalTensors(self.program)
        kept = self.optimizer_state(held)
        places = {key: piece_of(tensor, shard_spec(tensor)) for key, tensor in held.tensors.items()}
        return master_values(() if kept is None else kept.main_params(), held.buffers(), places)

    def use_masters(self) -> None:
        """Copy the values of the tensors that Megatron's optimizer steps to the model. Collective."""
        with self._call_context():
            if self.options.precision != "fp32":
                private.copy_main_params(self.optimizer)
            if self.options.distributed_optimizer:
                for chunk in self.model:
                    chunk.start_param_sync(force_sync=True)

    def _release_process(self) -> None:
        self._state.close()  # the next engine would take an open state for the user's

    def _abandon(self) -> None:
        self._detach()
        self._state.forget()

    def _detach(self) -> None:
        for chunk in self.model:
            private.release_hooks(chunk)
        # drop all references to process groups: their threads end with the last one
        self.model, self._stages, self.optimizer, self._sender, self._run = [], [], None, None, None
        self.config.finalize_model_grads_func = self.config.no_sync_func = None
        self._ties.clear()

    # ---- one step

    def _train(self, batch: MicroBatches) -> tuple[torch.Tensor, list[LossReduction]]:
        self._begin(batch, training=True)
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self._modes.restore_frozen()
        with mode_of(self._device_type):
            with without_warnings():
                self.optimizer.zero_grad()
            with self._unused.watch_backwards(), self._gradients.compare_backwards():
                loss = self._run_schedule(batch, training=True)
            with without_warnings():
                _, norm, _ = self.optimizer.step()
        self.has_stepped = True
        self._set_grad_norm(norm)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        return loss, self._stages[-1].counted

    def _evaluate(self, batch: MicroBatches, training: bool = False) -> tuple[torch.Tensor, list[LossReduction]]:
        self._begin(batch, training)
        for chunk in self.model:
            chunk.train(training)
        self._modes.restore_frozen()
        with mode_of(self._device_type):
            loss = self._run_schedule(batch, training=False)
        return loss, self._stages[-1].counted

    def _run_schedule(self, batch: MicroBatches, training: bool) -> torch.Tensor:
        """Run all micro-batches and return their mean loss over all replicas."""
        iterators = [enumerate_micro_batches(batch.parts, batch.labels) for _ in self.model]
        several = len(self.model) > 1
        options: dict[str, Any] = {}
        if len(self.program.stages) > 1:
            options["p2p_communicator"] = self._sender
            if not several:
                sizes = self._stages[0].sizes()
                options["adjust_tensor_shapes_fn"] = lambda *given: [[(1, 1, size)] for size in sizes]
        losses = self._run(
            forward_step_func=_forward_step,
            data_iterator=iterators if several else iterators[0],
            model=self.model,
            num_microbatches=len(batch.parts),
            seq_length=1,
            micro_batch_size=1,
            forward_only=not training,
            pg_collection=self.groups,
            **options,
        )
        mean = torch.zeros((), device=self.device)
        if self._stages[-1].post_process:
            mean = torch.stack([loss.float() for loss in losses]).mean()
        # only last stages contribute: one loss for each replica and tensor-parallel rank
        return all_reduce(mean, self.program.mesh) / (self.program.axis_size("dp") * self.program.axis_size("tp"))

    def _begin(self, batch: MicroBatches, training: bool) -> None:
        """Prepare the stages for the shapes of these micro-batches."""
        programs = [self.program] * len(batch.parts)
        if len(self.program.stages) > 1:
            programs = microbatch_plans(self.program, training, batch.parts, "Megatron")
        program = programs[0]
        if self._plan is None or self._plan[0] is not program:
            self._plan = program, borders(program.stages, self.options.dtype, self.device)
            self.config.pipeline_dtype, self.config.hidden_size = self._plan[1].dtype, self._plan[1].size
        for stage in self._stages:
            stage.begin(programs, self._plan[1], batch.weights)

    def _finalize(self, model: Any, num_tokens: Any = None, **given: Any) -> None:
        """Finish the gradients of a step: Megatron's reductions, the all-reduce of tied parameters, then the user's hooks."""
        from megatron.core.distributed import finalize_model_grads

        with without_warnings():
            finalize_model_grads(model, num_tokens, **given)
        for tie in self._ties:
            if tie.parameter.requires_grad:
                dist.all_reduce(private.main_grad(tie.parameter), group=tie.group)
        self._run_hooks()


def _parameters_by_name(chunks: nn.ModuleList) -> dict[str, nn.Parameter]:
    return {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}


def _forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    # Packed outside of any module: sharded values cross as shards, which no module's forward may mix.
    # Megatron divides the loss in place; the copy is to keep.
    return model.module.output_tensor(model(*next(iterator))), lambda loss: (loss, loss.detach().clone())
