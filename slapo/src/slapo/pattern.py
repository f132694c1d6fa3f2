"""Patterns that ``Schedule.find`` looks for."""

from slapo_tracing import ModulePattern, Pattern, call_module

__all__ = ["ModulePattern", "Pattern", "call_module"]
