"""Dialects: how a schedule is handed to a training framework."""

from slapo_core import Dialect

from .registry import get_all_dialects, get_dialect_cls, init_target_engine

__all__ = ["Dialect", "get_all_dialects", "get_dialect_cls", "init_target_engine"]
