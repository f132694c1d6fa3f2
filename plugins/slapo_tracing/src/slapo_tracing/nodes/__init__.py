"""Values, functions and modes that appear in traced graphs, and Python code for graphs.

May import no other sub-package.
"""
