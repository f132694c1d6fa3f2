"""Traced modules: the graphs of one module, and the guards that choose a graph for a call.

May import ``recording`` and ``nodes``.
"""
