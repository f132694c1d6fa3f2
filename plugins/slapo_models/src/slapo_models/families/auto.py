"""Any model without a file of its own."""

from __future__ import annotations

from typing import Any

from slapo_core import Schedule

from ..shared_steps.blocks import block_lists
from ..shared_steps.configuration import Configuration
from ..shared_steps.transformer import schedule_lists


def schedule(sch: Schedule, **options: Any) -> Schedule:
    """Schedule any model: its repeated blocks are found, and its plans are those it publishes, or derived ones."""
    config = Configuration.read(sch, "auto", options)
    return schedule_lists(sch, config, block_lists(sch, config))
