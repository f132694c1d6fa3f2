"""Megatron's memory of a training step, on fake tensors: gradient buffers, main copies, and tensors between stages.

Options and stages of a program enter; ``MegatronStageRunner`` leaves, which ``MegatronStepModel`` gives to planners.
Megatron itself is not imported. It may import ``configuration`` and ``pipeline``.
"""
