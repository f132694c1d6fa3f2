"""Search in traced graphs: patterns, matches, and the queries ``find``, ``find_node`` and ``find_subgraph`` of a
schedule.

May import ``tracers`` and the sub-packages below it.
"""
