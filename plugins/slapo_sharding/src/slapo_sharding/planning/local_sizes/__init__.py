"""Forwards that count a rank's part where the model's code counts the whole.

Code like ``B, N, C = x.shape`` and ``view(B, N, heads, C // heads)`` takes sizes of whole tensors and of attributes of the
unmodified module, while a sharded layer returns a part. What enters is a module and how its layers are split. What leaves is
the same module, whose forward runs from graphs of the whole module in which the sizes of sharded dimensions are divided by the
number of ranks. It imports the dry run (``layouts``) and ``slapo_core``.
"""
