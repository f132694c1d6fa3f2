"""Tracing: a module's forward as a graph."""

from .traced_module import TracedModule
from .tracers import trace, trace_module

__all__ = ["TracedModule", "trace", "trace_module"]
