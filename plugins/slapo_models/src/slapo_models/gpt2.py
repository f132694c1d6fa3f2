"""GPT-2."""

from __future__ import annotations

from typing import Any

from slapo_core.schedule import Schedule

from .blocks import base_of, blocks_of, cut_blocks, recomputed
from .configuration import Configuration
from .transformer import schedule_transformer


def schedule(sch: Schedule, **options: Any) -> Schedule:
    """Schedule GPT-2, whose blocks are ``h``."""
    config = Configuration.read(sch, "gpt2", options)
    blocks = blocks_of(base_of(sch, config, "h")["h"])
    return schedule_transformer(sch, config, recomputed(sch, config, blocks), cut_blocks(sch, config, blocks))
