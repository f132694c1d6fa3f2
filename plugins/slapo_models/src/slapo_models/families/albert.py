"""ALBERT."""

from __future__ import annotations

from typing import Any

from slapo_core import Schedule

from ..shared_steps.configuration import Configuration
from ..shared_steps.recomputation import checkpointed_blocks
from ..shared_steps.stages import stage_end_blocks
from ..shared_steps.transformer import base_model, blocks_of, take_steps

_LACKS = {"disable_fuse_bias_gelu": "as the MLP is in the layer's own forward; call compile() on the blocks, which fuses it"}


def schedule(sch: Schedule, **options: Any) -> Schedule:
    """Schedule ALBERT, whose blocks are the groups of ``encoder.albert_layer_groups``, each run for several layers.

    ``ckpt_ratio`` is a share of the groups. ``pipeline_cuts`` counts layers; a stage ends only where a group's last one does.
    """
    config = Configuration.read(sch, "albert", options, _LACKS)
    encoder: Any = base_model(sch, config, "encoder.albert_layer_groups")["encoder"]
    groups, layers = blocks_of(encoder["albert_layer_groups"]), encoder.mod.config.num_hidden_layers
    of = [int(layer / (layers / len(groups))) for layer in range(layers)]
    ends = [groups[of[layer]] if [*of, None][layer + 1] != of[layer] else None for layer in range(layers)]
    return take_steps(sch, config, checkpointed_blocks(sch, config, groups), stage_end_blocks(sch, config, ends))
