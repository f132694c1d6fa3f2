"""Hook implementations of slapo-tune."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slapo_core import Schedule, hookimpl


@hookimpl
def slapo_schedule_function(namespace: dict[str, Any], config: Mapping[str, Any] | None) -> Callable[[Schedule], Any] | None:
    """Bind the space of a schedule file with ``schedule(sch, space)``."""
    from .schedule_space.schedule_file import bind_schedule  # noqa: PLC0415  finding plugins must stay cheap

    return bind_schedule(namespace, config)
