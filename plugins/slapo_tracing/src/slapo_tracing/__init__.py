"""Tracing: a module's forward as a graph, patterns to find in it, and edits of it."""

from .graphs.traced_module import TracedModule
from .matching.matcher import find_by_name as match
from .matching.patterns import ModulePattern, Pattern, call_module
from .tracers.selection import trace, trace_module

__all__ = ["ModulePattern", "Pattern", "TracedModule", "call_module", "match", "trace", "trace_module"]
