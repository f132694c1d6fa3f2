"""Search in traced graphs: patterns, matches, and the queries ``find``, ``find_node`` and ``find_subgraph`` of a schedule.

This sub-package may import ``tracers`` and the sub-packages below it.
"""

from .matcher import Match, traced_modules
from .operators import bound_arguments, operator_of, signatures_of
from .queries import matches_of

__all__ = ["Match", "bound_arguments", "matches_of", "operator_of", "signatures_of", "traced_modules"]
