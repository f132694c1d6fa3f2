"""Finding and registering schedules."""

from slapo_models import get_schedule, register_schedule

__all__ = ["get_schedule", "register_schedule"]
