"""The model as one flat graph. A model, its example inputs and the positions of its cuts enter; a traced module leaves
in which every module without a cut inside is one node. `cuts.py` reads the cuts from the journal and
records marks in a forward, and `root_hooks.py` moves hooks of the whole model to its first and last stage. This is
the lowest room: it imports `slapo_core` only.
"""

from .cuts import pipe_split

__all__ = ["pipe_split"]
