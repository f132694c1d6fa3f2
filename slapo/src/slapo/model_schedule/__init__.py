"""Ready schedules of model families."""

from .api import apply_schedule
from .registry import get_schedule, register_schedule

__all__ = ["apply_schedule", "get_schedule", "register_schedule"]
