"""T5."""

from __future__ import annotations

from typing import Any

from slapo_core.schedule import Schedule

from .blocks import base_of, blocks_of, cut_blocks, recomputed
from .configuration import Configuration
from .transformer import schedule_transformer


def schedule(sch: Schedule, **options: Any) -> Schedule:
    """Schedule T5, whose blocks are ``encoder.block`` and ``decoder.block``; with cuts one lies behind the encoder, too."""
    config = Configuration.read(sch, "t5", options)
    base = base_of(sch, config, "encoder.block", "decoder.block")
    encoder, decoder = blocks_of(base["encoder.block"]), blocks_of(base["decoder.block"])
    cuts = cut_blocks(sch, config, encoder, decoder)
    if config.pipeline_cuts:
        cuts.append(base["encoder"])
    recompute = [*recomputed(sch, config, encoder), *recomputed(sch, config, decoder)]
    return schedule_transformer(sch, config, recompute, cuts)
