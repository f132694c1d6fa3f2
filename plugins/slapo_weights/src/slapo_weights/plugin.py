"""Hook implementations of slapo-weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slapo_core import hookimpl


@hookimpl
def slapo_before_build(config: dict[str, Any]) -> Callable[..., Any] | None:
    """Return the loader of ``build(..., weights=...)``."""
    weights = config.pop("weights", None)
    if weights is None:
        return None
    from .load import make_loader  # noqa: PLC0415  (finding plugins must stay cheap)

    return make_loader(weights)
