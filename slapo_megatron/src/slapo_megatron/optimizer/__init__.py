"""Optimizer side of Megatron's engine: the local part of each tensor, Megatron's optimizer wrappers, their state and
the reduced gradients. In: an engine with its options, the stages of this rank and the program. Out: tensors and
optimizer state under original parameter names. May import ``configuration`` and ``process_state``.
"""
