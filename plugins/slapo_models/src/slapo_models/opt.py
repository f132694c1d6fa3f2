"""OPT."""

from __future__ import annotations

from typing import Any

from slapo_core.schedule import Schedule

from .blocks import base_of, blocks_of, cut_blocks, recomputed
from .configuration import Configuration
from .transformer import schedule_transformer

_LACKS = {"disable_fuse_bias_gelu": "as the MLP is in the layer's own forward; call compile() on the blocks, which fuses it"}


def schedule(sch: Schedule, **options: Any) -> Schedule:
    """Schedule OPT, whose blocks are ``decoder.layers``."""
    config = Configuration.read(sch, "opt", options, _LACKS)
    blocks = blocks_of(base_of(sch, config, "decoder.layers")["decoder.layers"])
    return schedule_transformer(sch, config, recomputed(sch, config, blocks), cut_blocks(sch, config, blocks))
