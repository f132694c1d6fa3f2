"""All private and undocumented names of Megatron-Core that this package uses; a test fails when Megatron moves one.

Other modules of this package import only Megatron's documented packages, and read none of these attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.planner import SavePlan

from slapo_core import is_sharded, shard_spec
from slapo_training.engines import without_warnings


def complete_imports() -> None:
    """Import a module that Megatron would import inside the first step, with warnings."""
    import megatron.core.transformer.multi_token_prediction  # noqa: F401


def cuda_rng_functions() -> tuple[tuple[Any, str], tuple[Any, str]]:
    """Return owner and name of the functions that read and write CUDA's random state without ``torch.cuda``'s functions."""
    with without_warnings():
        import megatron.core.tensor_parallel.random as megatron_random
    return (megatron_random, "_get_cuda_rng_state"), (megatron_random, "_set_cuda_rng_state")


def communicator(group: Any, config: Any) -> Any:
    """Return the object that sends and receives between pipeline stages without interleaving."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    return P2PCommunicator(pp_group=group, config=config)


def model_type() -> Any:
    """Return Megatron's model type for a plain encoder or decoder, whose stages are all treated alike."""
    from megatron.core.enums import ModelType

    return ModelType.encoder_or_decoder


def release_hooks(chunk: Any) -> None:
    """Remove the hooks of Megatron's ``DistributedDataParallel``, which form a reference cycle with it."""
    chunk.grad_accs.clear()


def mark_tie(parameter: nn.Parameter, is_first: bool) -> None:
    """Give a tied parameter a bucket of its own, so that all copies are sharded equally, and count it in the norm once."""
    vars(parameter).update(shared_embedding=True, shared=not is_first)


def mark_shards(module: nn.Module) -> None:
    """Set the attributes by which Megatron counts each shard in the norm, and a replicated parameter once."""
    for parameter in module.parameters():
        vars(parameter).update(allreduce=True, sequence_parallel=False, tensor_model_parallel=is_sharded(parameter))
        if is_sharded(parameter) and (spec := shard_spec(parameter)) is not None:
            vars(parameter).update(partition_dim=spec.dim, partition_stride=len(spec.blocks))


def main_grad(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient in Megatron's buffer."""
    return parameter.main_grad  # type: ignore[attr-defined,no-any-return]


def gradient_buckets(chunks: Iterable[Any]) -> Iterator[tuple[list[nn.Parameter], torch.Tensor]]:
    """Iterate over the buckets of Megatron's ``DistributedDataParallel``: their parameters, and the memory of the gradients."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for bucket in buffer.buckets:
                yield bucket.params_list, bucket.grad_data


def main_param(parameter: Any) -> Any:
    """Return the fp32 copy of a parameter that the optimizer steps, or the parameter itself if there is no copy."""
    return getattr(parameter, "main_param", parameter)


def optimizer_range(outer: Any, parameter: torch.Tensor) -> tuple[torch.Tensor, int, int] | None:
    """Return the tensor that a replica's distributed optimizer steps for a parameter, and its range of elements; or None."""
    if parameter not in outer.model_param_group_index_map:
        return None
    group, order = outer.model_param_group_index_map[parameter]
    found = outer._get_model_param_range_map(parameter)["param"]
    return outer.optimizer.param_groups[group]["params"][order], found.start, found.end


def copy_main_params(outer: Any) -> None:
    """Copy the fp32 weights of Megatron's optimizer to the model."""
    outer._copy_main_params_to_model_params()


def wrap_optimizer(
    optimizer: torch.optim.Optimizer, config: Any, chunks: Sequence[Any], groups: Any, init_state: Callable[..., None]
) -> Any:
    """Return an optimizer in the Megatron wrapper that its ``OptimizerConfig`` asks for; it then steps views or copies.

    ``chunks`` are Megatron's ``DistributedDataParallel`` around each stage of this rank, ``groups`` its
    ``ProcessGroupCollection``. ``init_state`` initializes the state of an optimizer that has not stepped.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    for group in optimizer.param_groups:
        group.update(is_expert_parallel=False, wd_mult=1.0, lr_mult=1.0, is_decoupled_lr=False)  # Megatron reads these
    if config.use_distributed_optimizer:
        made = DistributedOptimizer(
            optimizer,
            config,
            None,
            init_state,
            model_chunks=list(chunks),
            per_model_buffers={index: chunk.buffers for index, chunk in enumerate(chunks)},
            data_parallel_group=groups.intra_dp_cp,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=torch.distributed.get_rank(groups.mp),
            distributed_optimizer_instance_id=0,
        )
        made.grad_stats_parallel_group = groups.intra_dist_opt
    else:
        wrapper = Float16OptimizerWithFloat16Params if config.bf16 else FP32Optimizer
        made = wrapper(optimizer, config, *([None] if config.bf16 else []), init_state)
        made.grad_stats_parallel_group = groups.mp
    made.tp_group = groups.tp
    return made


def has_fused_norms() -> bool:
    with without_warnings():
        from megatron.core.extensions.transformer_engine import HAVE_TE
        from megatron.core.fusions.fused_layer_norm import HAVE_FUSED_LAYER_NORM
    return bool(HAVE_TE or HAVE_FUSED_LAYER_NORM)


def fused_cross_entropy() -> Callable[..., torch.Tensor]:
    """Return Megatron's fused cross entropy of sharded logits."""
    with without_warnings():
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    return fused_vocab_parallel_cross_entropy  # type: ignore[no-any-return]


def silence_cuda_advice() -> None:
    """Keep Megatron from advising a variable that only CUDA reads."""
    from megatron.core.tensor_parallel import layers

    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True


def row_parallel_linear() -> Any:
    """Return Megatron's row-parallel layer, changed to use its own group also if its weight is frozen."""
    from megatron.core.tensor_parallel import RowParallelLinear

    class RowParallel(RowParallelLinear):  # type: ignore[misc]
        def _forward_impl(self, *args: Any, **given: Any) -> Any:
            return super()._forward_impl(*args, **{**given, "tp_group": self.tp_group})

    return RowParallel


def split_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a state dict, which is changed, into the sharded tensors and the rest, which is saved once."""
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    return save_preprocess(state, validate_access_integrity=False)  # type: ignore[no-any-return]


def sharded_tensors(sharded: dict[str, Any]) -> list[tuple[Any, bool]]:
    """Return the sharded tensors in nested dicts and lists, each with True if this rank saves it."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    return [(each, is_main_replica(each.replica_id)) for each in nested_values(sharded)]


def common_file() -> str:
    """Return the name of the file that is saved once."""
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

    return str(COMMON_STATE_FNAME)


def format_writer() -> Callable[[Path], None]:
    """Return a function that writes the format of a checkpoint into its directory."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    strategy = get_default_save_sharded_strategy()
    config = CheckpointingConfig(strategy.backend, strategy.version)
    return lambda folder: save_config(config, str(folder))


def save_planner() -> Any:
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

    return MCoreSavePlanner(flatten_state_dict=False)


def local_plan(planner: Any, sharded: dict[str, Any], common: dict[str, Any], is_first: bool) -> SavePlan:
    """Return the plan of this rank's save, after Megatron checked that all ranks' tensors are complete. Collective."""
    from megatron.core.dist_checkpointing import validation
    from megatron.core.dist_checkpointing.strategies import torch as megatron

    everyone = validation.determine_global_metadata(sharded)[1]
    validation.validate_sharding_integrity(everyone, common_state_dict=common)
    own, *_ = megatron._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    planner.set_up_planner(megatron.mcore_to_pyt_state_dict(own), is_coordinator=is_first)
    found: SavePlan = planner.create_local_plan()
    return found
