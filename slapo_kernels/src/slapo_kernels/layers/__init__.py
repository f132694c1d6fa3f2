"""Layers that users put into a model themselves, such as `FlashAttention` and `FusedMLP`; `slapo.op` exports them. A
layer takes the arguments of the module that it stands for, holds ordinary `nn.Linear` layers, which can be sharded,
and calls kernels in its forward. The room imports `dispatch` and `implementations`.
"""
