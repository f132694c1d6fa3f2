"""Edits of traced graphs: replace matched nodes by one call, or move them into a module.

A schedule and a match enter; the graph is changed in place, and the schedule learns how to undo the change. May
import ``matching`` and the sub-packages below it.
"""

from . import graph_edit
from .subgraph import Subgraph, resolve_nodes

__all__ = ["Subgraph", "graph_edit", "resolve_nodes"]
