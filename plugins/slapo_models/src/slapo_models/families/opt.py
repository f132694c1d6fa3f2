"""OPT. The steps are those of ``"auto"``; the file stays because the key refuses models of other families."""

from __future__ import annotations

from typing import Any

from slapo_core import Schedule

from ..shared_steps.configuration import Configuration
from ..shared_steps.transformer import schedule_blocks

_LACKS = {"disable_fuse_bias_gelu": "as the MLP is in the layer's own forward; call compile() on the blocks, which fuses it"}


def schedule(sch: Schedule, **options: Any) -> Schedule:
    """Schedule OPT, whose blocks are ``decoder.layers``."""
    return schedule_blocks(sch, Configuration.read(sch, "opt", options, _LACKS), "decoder.layers")
