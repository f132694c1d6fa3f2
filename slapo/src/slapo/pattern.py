"""Patterns that ``Schedule.find`` looks for."""

from slapo_core import ModulePattern, Pattern, call_module

__all__ = ["ModulePattern", "Pattern", "call_module"]
