"""Implementations of the kernels, one file each, named as `SLAPO_KERNELS` and `force=` name them. A function has the
name of its kernel, takes tensors, and returns tensors with gradients. `eager.py` defines what each kernel computes;
the others are tested against it. A function `refuses` tells which calls an implementation cannot compute. This is
the lowest room: it imports torch, `slapo_core` and, on the first call, the library that it wraps.
"""
