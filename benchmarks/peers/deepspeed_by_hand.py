"""The model written by hand for DeepSpeed: what a user without schedules would write."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.peers.models import CLIP, Language, Sizes, adamw, batch_of, loss_of
from benchmarks.peers.rounds import Step
from benchmarks.sharding import by_hand
from slapo_deepspeed.process_state.engine_import import import_deepspeed, start
from slapo_training.engines import without_warnings


def _config(sizes: Sizes) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": sizes.rows,
        "gradient_accumulation_steps": sizes.microbatches,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


class Ranks:
    """All ranks hold parts of one model, and none a replica; what ``mpu=`` has to answer. Collective."""

    def __init__(self) -> None:
        alone: list[dist.ProcessGroup] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self._alone = alone[dist.get_rank()]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._alone

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()


def tensor_parallel(sizes: Sizes) -> Step:
    """Column- and row-parallel layers written by hand, on DeepSpeed's engine."""
    deepspeed = import_deepspeed("cpu")
    start(deepspeed)
    model, (tokens, labels) = Language(sizes), batch_of(sizes)
    by_hand(model.blocks)
    with without_warnings():
        engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=_config(sizes), mpu=Ranks())

    def step() -> float:
        losses = []
        for x, y in zip(tokens.chunk(sizes.microbatches), labels.chunk(sizes.microbatches), strict=True):
            loss = loss_of(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item()

    return step


def pipeline(sizes: Sizes) -> Step:
    """The model as a list of layers, in DeepSpeed's ``PipelineModule``."""
    deepspeed = import_deepspeed("cpu")
    start(deepspeed)
    from deepspeed.pipe import PipelineModule

    model, (tokens, labels) = Language(sizes), batch_of(sizes)
    layers = [model.embedding, *model.blocks, model.head]
    with without_warnings():
        stages = PipelineModule(layers, num_stages=dist.get_world_size(), loss_fn=loss_of, partition_method="type:Block")
        engine, *_ = deepspeed.initialize(model=stages, optimizer=adamw(stages.parameters()), config=_config(sizes))
    parts = [*zip(tokens.chunk(sizes.microbatches), labels.chunk(sizes.microbatches), strict=True)]
    return lambda: float(engine.train_batch(iter(parts)))
