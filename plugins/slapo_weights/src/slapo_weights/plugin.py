"""What this distribution adds to Slapo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slapo_core import hookimpl


@hookimpl
def slapo_before_build(config: dict[str, Any]) -> Callable[..., Any] | None:
    """``build(..., weights=...)``: what gives the model its values."""
    weights = config.pop("weights", None)
    if weights is None:
        return None
    from .load import filler  # noqa: PLC0415  (finding plugins must stay cheap)

    return filler(weights)
