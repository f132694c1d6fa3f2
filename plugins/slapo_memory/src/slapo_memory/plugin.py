"""Hook implementations of slapo-memory."""

from __future__ import annotations

from slapo_core import hookimpl


@hookimpl
def slapo_primitives() -> dict[str, str]:
    return {"checkpoint": "slapo_memory.checkpoint:CheckpointPrimitive", "offload": "slapo_memory.offload:OffloadPrimitive"}
