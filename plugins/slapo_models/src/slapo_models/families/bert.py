"""BERT.

The steps are those of ``"auto"``. The file stays for what the key promises: a model of another family is refused, and of a
module that holds several models the right one is taken by ``prefix``.
"""

from __future__ import annotations

from typing import Any

from slapo_core import Schedule

from ..shared_steps.configuration import Configuration
from ..shared_steps.transformer import schedule_blocks


def schedule(sch: Schedule, **options: Any) -> Schedule:
    """Schedule BERT, whose blocks are ``encoder.layer``."""
    return schedule_blocks(sch, Configuration.read(sch, "bert", options), "encoder.layer")
