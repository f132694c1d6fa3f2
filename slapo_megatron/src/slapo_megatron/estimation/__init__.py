"""Megatron's memory of a training step, on fake tensors: gradient buffers, main copies, and tensors between stages.

Options and the parameters of a stage enter; a ``StageMemory`` leaves, which ``stage_runner.py`` above gives to planners.
Megatron itself is not imported. It may import ``configuration``.
"""
