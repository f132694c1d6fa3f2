"""Registration of the dialect ``torch``."""

from __future__ import annotations

from slapo_core import hookimpl


@hookimpl
def slapo_dialects() -> dict[str, str]:
    return {"torch": "slapo_torch.dialect:TorchDialect"}
