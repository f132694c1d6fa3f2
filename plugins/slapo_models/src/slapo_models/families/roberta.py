"""RoBERTa. The steps are those of ``"auto"``; the file stays because the key refuses models of other families."""

from __future__ import annotations

from typing import Any

from slapo_core import Schedule

from ..shared_steps.configuration import Configuration
from ..shared_steps.transformer import schedule_blocks


def schedule(sch: Schedule, **options: Any) -> Schedule:
    """Schedule RoBERTa, whose blocks are ``encoder.layer``."""
    return schedule_blocks(sch, Configuration.read(sch, "roberta", options), "encoder.layer")
