"""The private names of DeepSpeed and Megatron-Core that their dialects use, as the installed versions have them."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import reduce

_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
_CHECKPOINTING = "megatron.core.dist_checkpointing"

SIGNATURES: dict[str, dict[str, str | None]] = {
    "deepspeed": {
        "deepspeed.ops:__compatible_ops__": None,
        "deepspeed.ops.adagrad:DeepSpeedCPUAdagrad": None,
        "deepspeed.ops.adam:DeepSpeedCPUAdam": None,
        "deepspeed.ops.adam:FusedAdam": None,
        "deepspeed.ops.lamb:FusedLamb": None,
        "deepspeed.ops.lion:DeepSpeedCPULion": None,
        "deepspeed.ops.lion:FusedLion": None,
        "deepspeed.pipe:PipelineModule._index_tied_modules": "self",
        "deepspeed.pipe:PipelineModule._synchronize_tied_weights": "self",
        "deepspeed.pipe:PipelineModule.get_tied_weights_and_groups": "self",
        "deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine.is_decoupled": "self",
        "deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine.save": "self state_dict path",
        "deepspeed.runtime.config:DEEPSPEED_OPTIMIZERS": None,
        "deepspeed.runtime.config:DeepSpeedConfig": "config mpu",
        "deepspeed.runtime.config:DeepSpeedConfigError": None,
        "deepspeed.runtime.config_utils:DeepSpeedConfigModel": None,
        "deepspeed.runtime.engine:DeepSpeedEngine._take_model_step": "self lr_kwargs",
        "deepspeed.runtime.engine:DeepSpeedEngine.clip_fp32_gradients": "self",
        "deepspeed.runtime.lr_schedules:VALID_LR_SCHEDULES": None,
        "deepspeed.runtime.pipe.engine:PipelineEngine._allocate_or_extend_buffers": "self idx shape dtype",
        "deepspeed.runtime.pipe.engine:PipelineEngine.reset_activation_shape": "self",
        "deepspeed.runtime.pipe.topology:PipeModelDataParallelTopology": "num_pp num_mp num_dp",
        "deepspeed.runtime.utils:clip_grad_norm_": "parameters max_norm mpu",
        "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload._register_deepspeed_module": "self module count",
        "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload.get_param_coordinator": "self",
        "deepspeed.runtime.zero.parameter_offload:FWD_MODULE_STACK": None,
        "deepspeed.runtime.zero.partition_parameters:Init.param_id": None,
        "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator._invalidate_trace": "self",
        "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator.is_invalid_trace": "self",
        "deepspeed.utils:groups.mpu": None,
        f"{_BF16}._lazy_init_hp_params_optimizer_state": "self",
        f"{_BF16}.update_lp_params": "self",
        f"{_STAGE_1_AND_2}._lazy_init_hp_params_optimizer_state": "self",
        f"{_STAGE_1_AND_2}.update_lp_params": "self",
        f"{_STAGE_3}._clear_fp32_optimizer_param_groups": "self",
        f"{_STAGE_3}._get_param_partition_rank": "self param",
        f"{_STAGE_3}._reassign_or_swap_out_partitioned_parameters": None,
        f"{_STAGE_3}._set_fp32_optimizer_param_groups": "self",
        f"{_STAGE_3}.checkpoint_event_epilogue": "self",
        f"{_STAGE_3}.checkpoint_event_prologue": "self",
        f"{_STAGE_3}.get_param_id": "self param",
    },
    "megatron": {
        f"{_CHECKPOINTING}.core:CheckpointingConfig": "sharded_backend sharded_backend_version",
        f"{_CHECKPOINTING}.core:save_config": "config checkpoint_dir",
        f"{_CHECKPOINTING}.dict_utils:nested_values": "x",
        f"{_CHECKPOINTING}.mapping:is_main_replica": "replica_id",
        f"{_CHECKPOINTING}.serialization:get_default_save_sharded_strategy": "",
        f"{_CHECKPOINTING}.state_dict_utils:save_preprocess": "sharded_state_dict validate_access_integrity",
        f"{_CHECKPOINTING}.strategies.common:COMMON_STATE_FNAME": None,
        f"{_CHECKPOINTING}.strategies.filesystem_async:_results_queue": None,
        f"{_CHECKPOINTING}.strategies.torch:MCoreSavePlanner": None,
        f"{_CHECKPOINTING}.strategies.torch:_replace_state_dict_keys_with_sharded_keys": (
            "sharded_state_dict keep_only_main_replica"
        ),
        f"{_CHECKPOINTING}.strategies.torch:mcore_to_pyt_state_dict": "state_dict",
        f"{_CHECKPOINTING}.validation:determine_global_metadata": "sharded_state_dict",
        f"{_CHECKPOINTING}.validation:validate_sharding_integrity": "global_metadata common_state_dict",
        "megatron.core.enums:ModelType.encoder_or_decoder": None,
        "megatron.core.extensions.transformer_engine:HAVE_TE": None,
        "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy": "vocab_parallel_logits target tp_group",
        "megatron.core.fusions.fused_layer_norm:HAVE_FUSED_LAYER_NORM": None,
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer": (
            "optimizer config grad_scaler init_state_fn model_chunks per_model_buffers data_parallel_group "
            "data_parallel_group_gloo data_parallel_group_idx distributed_optimizer_instance_id"
        ),
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._get_model_param_range_map": "self param",
        "megatron.core.optimizer.optimizer:FP32Optimizer": "optimizer config init_state_fn",
        "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params": "optimizer config grad_scaler init_state_fn",
        "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params._copy_main_params_to_model_params": "self",
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator": "pp_group config",
        "megatron.core.tensor_parallel:RowParallelLinear._forward_impl": None,
        "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce.warned": None,
        "megatron.core.tensor_parallel.random:_get_cuda_rng_state": None,
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state": "new_state",
        "megatron.core.transformer.multi_token_prediction:__name__": None,
    },
}
"""Names and their parameters; None for what is not called with arguments."""

ATTRIBUTES: dict[str, dict[str, str]] = {
    "deepspeed": {
        "deepspeed.runtime.engine": "_config basic_optimizer checkpoint_engine global_samples global_steps skipped_steps",
        "deepspeed.runtime.bf16_optimizer": "_hp_grad _hp_optimizer_states_linked bf16_groups fp32_groups_flat_partition",
        "deepspeed.runtime.fp16.fused_optimizer": "fp32_groups_flat",
        "deepspeed.runtime.fp16.unfused_optimizer": "fp32_groups",
        "deepspeed.runtime.utils": "ds_pipe_replicated model_parallel tensor_model_parallel",
        "deepspeed.runtime.zero.parameter_offload": "_external_params",
        "deepspeed.runtime.zero.partition_parameters": "ds_id ds_numel ds_shape ds_tensor",
        "deepspeed.runtime.zero.stage3": (
            "_z3_optimizer clip_grad fp16_groups fp16_partitioned_groups_flat fp32_partitioned_groups_flat grad_position "
            "loss_scaler parameter_offload sub_group_to_group_id"
        ),
        "deepspeed.runtime.zero.stage_1_and_2": (
            "_hp_optimizer_states_linked bit16_groups clip_grad loss_scaler round_robin_bit16_groups "
            "round_robin_bit16_offsets single_partition_of_fp32_groups"
        ),
    },
    "megatron": {
        "megatron.core.distributed.distributed_data_parallel": "buffers expert_parallel_buffers grad_accs",
        "megatron.core.distributed.param_and_grad_buffer": "grad_data main_grad params_list",
        "megatron.core.optimizer.distrib_optimizer": "model_param_group_index_map",
        "megatron.core.optimizer.optimizer": "grad_stats_parallel_group main_param shared tp_group",
    },
}
"""Attributes that a module of the engine sets or reads."""


def check(engine: str) -> None:
    """Raise ``AssertionError`` for a name that the engine no longer has, or that has other parameters."""
    for path, parameters in SIGNATURES[engine].items():
        module, _, name = path.partition(":")
        found = reduce(getattr, name.split("."), importlib.import_module(module))
        if parameters is not None:
            missing = {*parameters.split()} - {*inspect.signature(found).parameters}
            assert not missing, f"{path} has no parameter {missing}"
    for module, names in ATTRIBUTES[engine].items():
        source = inspect.getsource(importlib.import_module(module))
        for name in names.split():
            assert re.search(rf"[.'\"]{name}\b", source), f"{module} has no attribute {name}"


def check_values() -> None:
    """Raise ``AssertionError`` where a name of DeepSpeed or Megatron has a value of another kind than is taken over."""
    from deepspeed.ops import __compatible_ops__
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import Init
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    assert "deepspeed_shm_comm" in __compatible_ops__
    assert type(parameter_offload.FWD_MODULE_STACK) is list
    assert Init.param_id == 0
    assert parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ == ([0],)
    assert filesystem_async._results_queue is None
