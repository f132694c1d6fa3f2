"""Hooks of ``create_schedule`` and ``build``: they start the checks, which no other code calls."""

from __future__ import annotations

from typing import Any

from slapo_core import hookimpl


@hookimpl
def slapo_after_create(schedule: Any) -> None:
    """Record the unmodified model for the checks."""
    from .checks.check_list import record_original_model  # noqa: PLC0415  (finding plugins must stay cheap)

    record_original_model(schedule)


@hookimpl
def slapo_before_build(schedule: Any, target: str | None, config: dict[str, Any]) -> None:
    """Give synced norms their replicas, and start the checks."""
    from .checks.check_list import start_checks  # noqa: PLC0415
    from .sync_batch_norm import resolve_replicas  # noqa: PLC0415

    resolve_replicas(schedule)
    start_checks(schedule, target, config)
