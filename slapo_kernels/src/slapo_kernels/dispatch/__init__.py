"""The dispatcher of kernels. It receives the name of a kernel and its arguments, and runs the first implementation
that supports their device and dtype. `kernels.py` lists the built-in implementations in order of preference, and
`registry.py` adds those of other plugins and reads `SLAPO_KERNELS`. The room imports `implementations`.

While a model is traced, a call runs the eager implementation, so that the trace records operations of torch.
`torch.compile` also gets operations of torch, which it fuses itself, unless the user forces another implementation.
"""
