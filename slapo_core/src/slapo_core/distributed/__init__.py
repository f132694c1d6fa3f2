"""Agreement between ranks, full tensors from local shards, random number generators, and the end of gloo's threads.

All functions are collective unless they say otherwise. May import ``interfaces``, ``modules`` and ``reporting``.
"""
