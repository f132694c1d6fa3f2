"""The model written by hand for Megatron-Core: what a user without schedules would write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.peers.models import CLIP, RATE, Language, Sizes, batch_of, loss_of
from benchmarks.peers.rounds import Step
from slapo_megatron.process_state.cpu_mode import cpu_mode
from slapo_training.engines import without_warnings


def tensor_parallel(sizes: Sizes) -> Step:
    """Megatron's column- and row-parallel layers in each block."""
    with cpu_mode(), without_warnings():
        config = _config(sizes, tensor_model_parallel_size=dist.get_world_size())
        model = Language(sizes)
        for block in model.blocks.children():
            _split(block, config)
        return _trained(sizes, config, model)


def pipeline(sizes: Sizes) -> Step:
    """Return the step of a pipeline with the same number of blocks on each rank."""
    with cpu_mode(), without_warnings():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        config = _config(sizes, pipeline_model_parallel_size=ranks)
        model = Language(sizes)
        size = sizes.layers // ranks
        mine = [*model.blocks[rank * size : (rank + 1) * size]]
        layers = [*([model.embedding] if rank == 0 else []), *mine, *([model.head] if rank == ranks - 1 else [])]
        return _trained(sizes, config, nn.Sequential(*layers))


def _config(sizes: Sizes, **layout: int) -> Any:
    """Megatron's, and its groups. Collective."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**layout, create_gloo_process_groups=False)
    model = {"num_layers": sizes.layers, "hidden_size": sizes.hidden, "num_attention_heads": sizes.heads}
    config = TransformerConfig(
        **model,
        **layout,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
    )
    config.finalize_model_grads_func = finalize_model_grads
    return config


@torch.no_grad()
def _split(block: nn.Module, config: Any) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    class Column(ColumnParallelLinear):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = super().forward(x)[0]  # beside a bias that it has added
            return found

    class Row(RowParallelLinear):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = super().forward(x)[0]
            return found

    rank, ranks = dist.get_rank(), dist.get_world_size()
    given: dict[str, Any] = {"config": config, "init_method": nn.init.zeros_, "bias": True}
    for name in ("qkv", "up"):
        whole = getattr(block, name)
        column = Column(whole.in_features, whole.out_features, gather_output=False, **given)
        column.weight.copy_(whole.weight.chunk(ranks)[rank])
        column.bias.copy_(whole.bias.chunk(ranks)[rank])
        setattr(block, name, column)
    for name in ("proj", "down"):
        whole = getattr(block, name)
        row = Row(whole.in_features, whole.out_features, input_is_parallel=True, skip_bias_add=False, **given)
        row.weight.copy_(whole.weight.chunk(ranks, 1)[rank])
        row.bias.copy_(whole.bias)
        setattr(block, name, row)


def _trained(sizes: Sizes, config: Any, layers: nn.Module) -> Step:
    """The layers of this rank under Megatron's gradients, optimizer and order of micro-batches."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import MegatronModule

    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()

    class Stage(MegatronModule):  # type: ignore[misc]
        """Stage to which Megatron passes the previous stage's tensor before the call."""

        model_type = ModelType.encoder_or_decoder
        pre_process, post_process = is_first, is_last
        share_embeddings_and_output_weights = False

        def __init__(self) -> None:
            super().__init__(config)
            self.layers = layers
            self._received: torch.Tensor | None = None

        def set_input_tensor(self, received: list[torch.Tensor | None]) -> None:
            self._received = received[0]

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.layers(tokens if is_first else self._received)

    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), Stage())
    settings = OptimizerConfig(optimizer="adam", lr=RATE, weight_decay=0.0, adam_eps=1e-8, clip_grad=CLIP)
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    run = get_forward_backward_func()
    tokens, labels = batch_of(sizes)
    parts = [*zip(tokens.chunk(sizes.microbatches), labels.chunk(sizes.microbatches), strict=True)]

    def forward(data: Iterator[tuple[torch.Tensor, torch.Tensor]], model: nn.Module) -> Any:
        x, y = next(data)

        def loss_and_log(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = loss_of(output, y)
            return loss, loss.detach().clone()  # the loss itself is divided in place

        return model(x), loss_and_log

    def step() -> float:
        with cpu_mode():
            model.zero_grad_buffer()
            optimizer.zero_grad()
            found = run(
                forward_step_func=forward,
                data_iterator=iter(parts),
                model=[model],
                num_microbatches=sizes.microbatches,
                seq_length=sizes.rows,  # activations have the rows in front here
                micro_batch_size=sizes.sequence,
            )
            optimizer.step()
        return torch.stack(found).mean().item() if is_last else 0.0

    return step
