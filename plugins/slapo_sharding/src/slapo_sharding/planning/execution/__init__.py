"""Steps of a plan beyond ``shard`` and ``sync``: dropout, stacked experts, direct parameters, engine layers.

What enters is a schedule handle and a plan. What leaves is the same handle after these steps. ``rng_forks`` finds the
modules that need random numbers of their own on each rank; ``plan_steps`` lets layers with the same input share one
reduction of its gradient; ``layer_backends`` replaces split layers by those of an engine. The room imports
``planning.derivation`` and the rooms below it.
"""

from .layer_backends import LayerBackend

__all__ = ["LayerBackend"]
