"""Wide-ResNet, and other residual networks of the same structure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from slapo_core import Schedule

from ..shared_steps.configuration import Configuration
from ..shared_steps.recomputation import checkpointed_blocks
from ..shared_steps.stages import stage_end_blocks
from ..shared_steps.transformer import base_model, blocks_of, take_steps

_LISTS = ("layer1", "layer2", "layer3", "layer4")
_LACKS = {
    "attn_op_name": "as a residual network has no attention; leave it out",
    "disable_flash_attn": "as a residual network has no attention; leave it out",
    "disable_fuse_bias_gelu": "as a residual network has no MLP; call compile() on the blocks, which fuses what they have",
    "sequence_parallel": "as images have no sequence; leave it out",
    "parallel_loss": "as its head is whole on every rank; leave it out",
}


def schedule(sch: Schedule, **options: Any) -> Schedule:
    """Schedule a residual network, whose blocks are in ``layer1`` to ``layer4``, with ``conv1``, ``bn1``, ``conv2`` in each."""
    config = Configuration.read(sch, "wideresnet", options, _LACKS)
    base = base_model(sch, config, *_LISTS)
    lists = [blocks_of(base[name]) for name in _LISTS]
    blocks = [block for each in lists for block in each]
    recompute, cuts = checkpointed_blocks(sch, config, blocks), stage_end_blocks(sch, config, *lists)
    return take_steps(sch, config, recompute, cuts, partial(split, blocks))


def split(blocks: Iterable[Schedule]) -> None:
    """Split blocks over the channels between their first two convolutions, and a third convolution over its output."""
    for block in blocks:
        block["conv1"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        block["bn1"].shard("weight", axis=0)
        block["conv2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        if "conv3" in block:
            block["conv3"].shard("weight", axis=0).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-3)
