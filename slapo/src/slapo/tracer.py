"""Modules as graphs."""

from slapo_core import trace, trace_module

__all__ = ["trace", "trace_module"]
