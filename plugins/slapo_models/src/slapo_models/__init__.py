"""Ready schedules per model family: ``apply_schedule(model, "gpt2", ckpt_ratio=0.5)``."""

from .apply import apply_schedule, get_schedule, register_schedule
from .shared_steps.configuration import Configuration

__all__ = ["Configuration", "apply_schedule", "get_schedule", "register_schedule"]
