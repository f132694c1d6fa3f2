"""Optimizer side of DeepSpeed's engine: the local part of each tensor, fp32 master weights, whole-tensor optimizers
and reduced gradients. In: an initialized DeepSpeed engine, the module of this rank and the program. Out: views of
ZeRO's flat tensors under original parameter names. May import ``process_state``.
"""
