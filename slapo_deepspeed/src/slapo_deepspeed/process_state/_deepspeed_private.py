"""All private and undocumented names of DeepSpeed that this package uses; a test fails when DeepSpeed moves one.

Other modules of this package import no ``deepspeed.runtime`` and no ``deepspeed.ops``, and read none of these attributes.
``model`` is DeepSpeed's engine, ``outer`` its optimizer for ZeRO or half precision, and ``inner`` the optimizer inside
``outer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Program, gather_objects, is_sharded
from slapo_training.engines import Tie


def disable_shared_memory_collective() -> None:
    """Disable DeepSpeed's shared-memory collective for CPUs, which DeepSpeed would compile with g++."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def forget_mpu() -> None:
    """Forget the ``mpu`` of an earlier engine, which an engine without a mesh would use otherwise."""
    import deepspeed.utils

    deepspeed.utils.groups.mpu = None


def align_numbering(program: Program) -> None:
    """Start the numbering of stage 3's parameters and modules from the same numbers on all ranks. Collective over the mesh.

    DeepSpeed compares these numbers between ranks in a forward. Where they differ, some ranks fail while others wait. A
    process that has had more engines than another one counts from higher numbers.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    (modules,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    found = gather_objects((Init.param_id, modules[0]), program.mesh)
    Init.param_id, modules[0] = (max(numbers) for numbers in zip(*found, strict=True))


def forget_modules(model: nn.Module) -> None:
    """Remove a model's modules from stage 3's stack of running modules, where the model and failed modules stay otherwise."""
    from deepspeed.runtime.zero import parameter_offload

    own = {*model.modules()}
    parameter_offload.FWD_MODULE_STACK[:] = [each for each in parameter_offload.FWD_MODULE_STACK if each not in own]


def read_config(config: Mapping[str, Any], mpu: Any) -> None:
    """Let DeepSpeed read a configuration; a ``DeepSpeedConfigError`` becomes a ``ValueError``."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    try:
        DeepSpeedConfig(config, mpu=mpu)
    except DeepSpeedConfigError as err:
        raise ValueError(str(err) or type(err).__name__) from err


def config_models() -> list[Any]:
    """Return the pydantic models of all sections of DeepSpeed's configuration."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    models: list[Any] = [DeepSpeedConfigModel]
    for model in models:
        models.extend(model.__subclasses__())
    return models


def optimizer_names() -> list[str]:
    """Return the names of DeepSpeed's own optimizer types in a configuration, in lower case."""
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    return list(DEEPSPEED_OPTIMIZERS)


def optimizer_class(kind: str, is_offloaded: bool) -> Any:
    """Return the class that DeepSpeed uses for ``"adagrad"``, ``"adam"``, ``"adamw"``, ``"lamb"`` or ``"lion"``."""
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    here = {"adagrad": torch.optim.Adagrad, "lamb": FusedLamb, "lion": FusedLion, "adam": FusedAdam, "adamw": FusedAdam}
    outside = {"adagrad": DeepSpeedCPUAdagrad, "lion": DeepSpeedCPULion, "adam": DeepSpeedCPUAdam, "adamw": DeepSpeedCPUAdam}
    return {**here, **outside}[kind] if is_offloaded else here[kind]


def schedule_classes() -> dict[str, Any]:
    from deepspeed.runtime import lr_schedules

    return {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}


def basic_optimizer(model: Any) -> Any:
    """Return the optimizer that DeepSpeed was given or made itself, or None."""
    return model.basic_optimizer


def inner_optimizer(model: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer inside of DeepSpeed's, or None."""
    if model.basic_optimizer is None:  # in bf16 there is an outer optimizer even without an inner one
        return None
    found: torch.optim.Optimizer = getattr(model.optimizer, "optimizer", model.optimizer)
    return found


def zero_config(model: Any) -> Any:
    return model._config.zero_config


def take_over(model: Any, step: Callable[..., None], clip: Callable[[], None]) -> Callable[..., None]:
    """Replace DeepSpeed's step, and its clipping without ZeRO and half precision. Return DeepSpeed's step."""
    original: Callable[..., None] = model._take_model_step
    model._take_model_step, model.clip_fp32_gradients = step, clip
    return original


def clip_gradients(model: Any, parameters: Iterable[nn.Parameter]) -> float:
    """Clip gradients as DeepSpeed does without ZeRO. Return their norm."""
    from deepspeed.runtime.utils import clip_grad_norm_

    return float(clip_grad_norm_(parameters, model.gradient_clipping(), mpu=model.mpu))


def num_skipped_steps(model: Any) -> int:
    """Return the number of steps that DeepSpeed skipped because gradients overflowed."""
    return int(model.skipped_steps)


COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""The names of DeepSpeed's counters, also in its checkpoints."""


def set_counters(model: Any, counters: Mapping[str, int]) -> None:
    for name in COUNTERS:
        setattr(model, name, counters[name])


def loss_scale(model: Any) -> float:
    """Return the loss scale that the gradients still contain."""
    return float(model.optimizer.loss_scale) if model.fp16_enabled() else 1.0


def loss_scaler(model: Any) -> Any:
    """Return the object that computes the loss scale, or None."""
    return getattr(model.optimizer, "loss_scaler", None)


def reset_clipping(model: Any) -> None:
    """Restore ZeRO's configured clipping, which loading a checkpoint overwrites."""
    if hasattr(model.optimizer, "clip_grad"):
        model.optimizer.clip_grad = model.gradient_clipping()


def saves_in_background(model: Any) -> bool:
    """Return True if DeepSpeed's checkpoint engine still writes after a save has returned."""
    return bool(model.checkpoint_engine.is_decoupled())


@contextmanager
def replaced_save(model: Any, save: Callable[..., Any]) -> Iterator[None]:
    """Replace the function that writes the files of a checkpoint inside; ``save`` gets DeepSpeed's as its first argument."""
    writer = model.checkpoint_engine
    writer.save = partial(save, writer.save)
    try:
        yield
    finally:
        del writer.save


def tied_pipeline(ties: Sequence[Tie]) -> Any:
    """Return DeepSpeed's ``PipelineModule`` class for these tied parameters; DeepSpeed itself ties only whole layers."""
    from deepspeed.pipe import PipelineModule

    class TiedPipeline(PipelineModule):  # type: ignore[misc]
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
                if parameter.grad is None:  # DeepSpeed would skip the all-reduce on this rank only, and others would wait
                    parameter.grad = torch.zeros_like(parameter)
            return found

    return TiedPipeline


def pipeline_topology(pp: int, dp: int, tp: int) -> Any:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    return PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)


def replace_receive_buffers(model: Any, allocate: Callable[[int, list[int], torch.dtype], torch.Tensor]) -> None:
    """Replace the allocation of received tensors; ``allocate`` takes index, shape and dtype."""
    model._allocate_or_extend_buffers = allocate


def forget_activation_shape(model: Any) -> None:
    """Let a pipeline send shapes again with the next micro-batch."""
    model.reset_activation_shape()


def mark_shards(module: nn.Module, pipeline_tp_rank: int | None) -> None:
    """Set the attributes by which DeepSpeed counts each shard in the norm, and replicated parameters once.

    ``pipeline_tp_rank`` is the rank within the tensor-parallel group in a pipeline, and None without one.
    """
    for parameter in module.parameters():
        # Without ZeRO, a pipeline's norm skips unmarked parameters on all stages but the first, and counts marked ones.
        is_first = pipeline_tp_rank is None or not getattr(parameter, "ds_pipe_replicated", False)
        marks = {"tensor_model_parallel": is_first and is_sharded(parameter)}
        if pipeline_tp_rank is not None:
            marks["model_parallel"] = is_first and pipeline_tp_rank == 0
        vars(parameter).update(marks)


class FlatRange(NamedTuple):
    """This rank's elements of a parameter in one of ZeRO's flat tensors.

    Args:
        flat: The flat fp32 tensor; for a frozen parameter of stage 3, a flat tensor of this parameter only.
        at: Index of the first element in ``flat``.
        first: Index of the first element in the parameter.
        last: Index after the last element in the parameter; at most ``first`` if there are no elements.
        is_stepped: True if the optimizer steps ``flat``.
    """

    flat: torch.Tensor
    at: int
    first: int
    last: int
    is_stepped: bool = True


def flat_ranges(outer: Any, replica: int, tensors: Iterable[torch.Tensor]) -> dict[int, FlatRange] | None:
    """Return this replica's range of each parameter by its ``id``, with stage 3 only of ``tensors``; None without ZeRO.

    DeepSpeed's ``safe_get_full_fp32_param`` reads wrong ranges if ``round_robin_gradients`` changes the parameters' order.
    """
    if hasattr(outer, "fp32_partitioned_groups_flat"):
        return {id(each): _stage_3_range(outer, each) for each in tensors if hasattr(each, "ds_id")}
    if hasattr(outer, "bf16_groups"):
        flats, groups = outer.fp32_groups_flat_partition, outer.bf16_groups
        starts = [[*accumulate((each.numel() for each in group), initial=0)] for group in groups]
    elif hasattr(outer, "round_robin_bit16_groups"):
        flats, groups = outer.single_partition_of_fp32_groups, outer.round_robin_bit16_groups
        starts = outer.round_robin_bit16_offsets
    else:
        return None
    found = {}
    for flat, group, offsets in zip(flats, groups, starts, strict=True):
        low = replica * flat.numel()
        for parameter, offset in zip(group, offsets, strict=False):
            first, last = max(offset, low), min(offset + parameter.numel(), low + flat.numel())
            found[id(parameter)] = FlatRange(flat, first - low, first - offset, last - offset)
    return found or None


def _stage_3_range(outer: Any, parameter: Any) -> FlatRange:
    step, size = parameter.ds_tensor.ds_numel, parameter.ds_numel
    first = min(step * outer._get_param_partition_rank(parameter), size)
    last = min(first + step, size)
    place = outer.grad_position.get(outer.get_param_id(parameter)) if parameter.requires_grad else None
    if place is None:
        return FlatRange(parameter.ds_tensor.view(-1), 0, first, last, is_stepped=False)
    return FlatRange(outer.fp32_partitioned_groups_flat[place[0]], place[1], first, last)


def parameter_groups(outer: Any, inner: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    """Return the model's parameters in each group of the inner optimizer, including those that other replicas step."""
    if hasattr(outer, "sub_group_to_group_id"):
        listed: list[list[nn.Parameter]] = [[] for _ in inner.param_groups]
        for index, each in enumerate(outer.fp16_groups):
            listed[outer.sub_group_to_group_id[index]] += each
        return listed
    known = getattr(outer, "bit16_groups", getattr(outer, "bf16_groups", None))
    return [group["params"] if known is None else known[index] for index, group in enumerate(inner.param_groups)]


def num_optimizer_steps(outer: Any) -> int | None:
    """Return how often ZeRO calls the inner optimizer in one step, each time for other parameters; None without ZeRO."""
    flats = getattr(outer, "fp32_partitioned_groups_flat", getattr(outer, "single_partition_of_fp32_groups", None))
    return None if flats is None or hasattr(outer, "bf16_groups") else len(flats)


def is_fp16_without_zero(outer: Any) -> bool:
    """Return True if the outer optimizer is one of DeepSpeed's fp16 optimizers without ZeRO."""
    return hasattr(outer, "fp32_groups_flat") or hasattr(outer, "fp32_groups")


@contextmanager
def weight_writing(outer: Any) -> Iterator[None]:
    """Allow writes into partitions and fp32 weights inside; on exit the model gets the new values. Collective."""
    is_stage_3 = hasattr(outer, "fp16_partitioned_groups_flat")
    if is_stage_3:
        outer.checkpoint_event_prologue()
    yield
    if is_stage_3:
        for index in range(len(outer.fp16_groups)):
            outer._reassign_or_swap_out_partitioned_parameters(index)
        outer.checkpoint_event_epilogue()
    elif hasattr(outer, "update_lp_params"):
        outer.update_lp_params()


@contextmanager
def state_loading(outer: Any, inner: torch.optim.Optimizer, num_states: int) -> Iterator[None]:
    """Give the inner optimizer its stepped tensors inside; on exit link its ``num_states`` loaded states to parameters."""
    is_stage_3 = hasattr(outer, "sub_group_to_group_id")
    if is_stage_3:
        outer._set_fp32_optimizer_param_groups()
    yield
    if is_stage_3:
        outer._clear_fp32_optimizer_param_groups()
    elif hasattr(outer, "_hp_optimizer_states_linked"):
        outer._hp_optimizer_states_linked = False
        if num_states == sum(len(group["params"]) for group in inner.param_groups):
            outer._lazy_init_hp_params_optimizer_state()


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of a parameter before stage 3 partitions it over the replicas, which leaves it empty."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def is_partitioned(parameter: Any) -> bool:
    """Return True if a parameter of stage 3 is not gathered, because no module that holds it is running."""
    return not parameter.numel() and bool(parameter.ds_numel)


def has_fp32_weight(parameter: torch.Tensor) -> bool:
    """Return True if stage 3 keeps fp32 values of a parameter."""
    return hasattr(parameter, "_z3_optimizer")


def bf16_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that the bf16 optimizer steps with, which is not ``grad``; None for other optimizers."""
    return getattr(parameter, "_hp_grad", None)


def watch_external_parameters(model: Any, module: nn.Module) -> None:
    """Let stage 3 record its plan of gathers anew when a module first reads a parameter of another module."""
    coordinator = getattr(model.optimizer, "parameter_offload", model.optimizer).get_param_coordinator()
    for each in module.modules():
        table: Any = each._external_params
        vars(each)["_external_params"] = _ExternalParameters(coordinator, table)


class _ExternalParameters(dict[int, nn.Parameter]):
    """Table of other modules' parameters that a module reads; a new entry invalidates the plan of gathers."""

    def __init__(self, coordinator: Any, held: dict[int, nn.Parameter]) -> None:
        super().__init__(held)
        self._coordinator = coordinator

    def __setitem__(self, key: int, parameter: nn.Parameter) -> None:
        if key not in self and not self._coordinator.is_invalid_trace():
            self._coordinator._invalidate_trace()
        super().__setitem__(key, parameter)
