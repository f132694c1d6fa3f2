"""Hook implementations of slapo-training."""

from __future__ import annotations

from slapo_core import hookimpl


@hookimpl
def slapo_queries() -> dict[str, str]:
    return {"full_state": "slapo_training.distributed.full_tensors:full_state"}
