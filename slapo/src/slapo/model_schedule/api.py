"""Applying a ready schedule."""

from slapo_models import apply_schedule

__all__ = ["apply_schedule"]
