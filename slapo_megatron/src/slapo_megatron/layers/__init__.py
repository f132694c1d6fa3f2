"""Megatron-Core's parallel layers and fused cross entropy in place of sharded modules:
``tensor_parallel(backend="megatron")``. In: a sharded module and its ``ShardSpec``. Out: a module with the same
parameters that runs Megatron's kernels, or the reason why there is none. May import ``process_state``.
"""
