"""T5. The steps are those of ``"auto"``; the file stays because the key refuses models of other families."""

from __future__ import annotations

from typing import Any

from slapo_core import Schedule

from ..shared_steps.configuration import Configuration
from ..shared_steps.recomputation import checkpointed_blocks
from ..shared_steps.stages import stage_end_blocks
from ..shared_steps.transformer import base_model, blocks_of, take_steps


def schedule(sch: Schedule, **options: Any) -> Schedule:
    """Schedule T5, whose blocks are ``encoder.block`` and ``decoder.block``; with cuts one lies behind the encoder, too.

    A model of the encoder alone has one list of blocks, and ``pipeline_cuts`` are numbers of these.
    """
    config = Configuration.read(sch, "t5", options)
    base = base_model(sch, config, "encoder.block")
    lists = [blocks_of(base[name]) for name in ("encoder.block", "decoder.block") if name in base]
    cuts = stage_end_blocks(sch, config, *lists)
    if config.pipeline_cuts and len(lists) > 1:
        cuts.append(base["encoder"])
    return take_steps(sch, config, checkpointed_blocks(sch, config, *lists), cuts)
