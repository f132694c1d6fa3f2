"""Modules as graphs."""

from slapo_tracing import trace, trace_module

__all__ = ["trace", "trace_module"]
