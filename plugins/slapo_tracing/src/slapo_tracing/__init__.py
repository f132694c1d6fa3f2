"""Tracing: a module's forward as a graph."""

from .graphs.traced_module import TracedModule
from .tracers.selection import trace, trace_module

__all__ = ["TracedModule", "trace", "trace_module"]
