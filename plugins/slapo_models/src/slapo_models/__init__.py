"""Ready schedules for any model: ``apply_schedule(model, ckpt_ratio=0.5)``; and models of published sizes without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import lazy_names

if TYPE_CHECKING:
    from .apply import apply_schedule, get_schedule, register_schedule
    from .published import PublishedSize, published_model, published_sizes
    from .shared_steps.configuration import Configuration
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "apply": ["apply_schedule", "get_schedule", "register_schedule"],
            "published": ["PublishedSize", "published_model", "published_sizes"],
            "shared_steps.configuration": ["Configuration"],
        },
    )

__all__ = [
    "Configuration",
    "PublishedSize",
    "apply_schedule",
    "get_schedule",
    "published_model",
    "published_sizes",
    "register_schedule",
]
