"""Slapo's logger."""

from slapo_core import get_logger

__all__ = ["get_logger"]
