"""Dialects: how a schedule is handed to a training framework."""

from slapo_core import Dialect, get_dialect_cls

__all__ = ["Dialect", "get_dialect_cls"]
