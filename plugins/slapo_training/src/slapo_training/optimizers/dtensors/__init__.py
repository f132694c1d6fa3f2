"""Sharded parameters that an optimizer steps in place as DTensors, without gathering them.

``shard_probe`` tests on the real process group whether an optimizer steps shards correctly and communicates
statistics alone. Equal shards of large parameters enter; stand-ins that share the shards' memory leave. Optimizer
state is sharded or replicated, so checkpoints equal those of owner ranks. It may import ``introspection``, ``probe``,
``whole_tensors``, ``gradient_hooks``, ``model`` and ``distributed``.
"""
