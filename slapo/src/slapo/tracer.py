"""Modules as graphs."""

from slapo_tracing import trace_module
from slapo_tracing.tracers import trace

__all__ = ["trace", "trace_module"]
