"""Hook implementations of this plugin."""

from __future__ import annotations

from slapo_core import hookimpl


@hookimpl
def slapo_dialects() -> dict[str, str]:
    return {"deepspeed": "slapo_deepspeed.dialect:DeepSpeedDialect"}
