"""Edits of traced graphs: replace matched nodes by one call, or move them into a module.

Functions take a schedule and a match, change the graph in place, and register the undo action with the schedule. This
sub-package may import ``matching`` and the sub-packages below it.
"""

from . import graph_edit
from .subgraph import Subgraph, resolve_nodes

__all__ = ["Subgraph", "graph_edit", "resolve_nodes"]
