"""What this plugin registers."""

from __future__ import annotations

from slapo_core.interfaces.hookspecs import hookimpl


@hookimpl
def slapo_dialects() -> dict[str, str]:
    return {"torch": "slapo_torch.dialect:TorchDialect"}
