"""Forwards that use local sizes where the model's code has whole ones.

Code like ``B, N, C = x.shape`` and ``view(B, N, heads, C // heads)`` takes sizes from whole tensors and from attributes of the
unmodified module, while a sharded layer returns a shard. What enters is a module and the splits of its layers. What leaves is
the same module. Its attributes count the local shard, or its forward runs from graphs of the whole module with the sizes of
sharded dimensions divided by the number of ranks. The room imports ``planning.dry_run``, ``planning.sequence``, ``syncs``,
``rules``, ``communication`` and ``slapo_core``.
"""
