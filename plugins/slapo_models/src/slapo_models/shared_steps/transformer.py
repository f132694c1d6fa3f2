"""The steps that all families of transformers have in common."""

from __future__ import annotations

from collections.abc import Iterable

from slapo_core import Schedule

from .blocks import base_model, blocks_of, checkpointed_blocks, stage_end_blocks
from .configuration import Configuration
from .input_broadcast import broadcast_input
from .kernels import use_kernels
from .precision import convert_precision


def schedule_blocks(sch: Schedule, config: Configuration, path: str) -> Schedule:
    """Take the steps of a model whose blocks are one list, at this path in the base model."""
    blocks = blocks_of(base_model(sch, config, path)[path])
    return schedule_transformer(sch, config, checkpointed_blocks(sch, config, blocks), stage_end_blocks(sch, config, blocks))


def schedule_transformer(
    sch: Schedule, config: Configuration, recomputed: Iterable[Schedule], stage_ends: Iterable[Schedule]
) -> Schedule:
    """Take the steps: kernels, tensor parallelism, recomputation, stages that end behind the given modules.

    The schedule is that of the whole model, head included.
    """
    convert_precision(sch, config)
    use_kernels(sch, config)
    if sch.world_size > 1:
        sch.tensor_parallel(sequence_parallel=config.sequence_parallel)
    broadcast_input(sch, config)
    for block in recomputed:
        block.checkpoint()
    for module in stage_ends:
        module.cut_pipeline_stage()
    return sch
