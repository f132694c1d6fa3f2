"""Ready schedules per model family: ``apply_schedule(model, "gpt2", ckpt_ratio=0.5)``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import lazy_names

if TYPE_CHECKING:
    from .apply import apply_schedule, get_schedule, register_schedule
    from .shared_steps.configuration import Configuration
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "apply": ["apply_schedule", "get_schedule", "register_schedule"],
            "shared_steps.configuration": ["Configuration"],
        },
    )

__all__ = ["Configuration", "apply_schedule", "get_schedule", "register_schedule"]
