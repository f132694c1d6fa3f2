"""DeepSpeed's memory of a training step, on fake tensors: ZeRO's flat tensors, buckets, gathered parameters, pipeline buffers.

Options and stages of a program enter; ``DeepSpeedStageRunner`` leaves, which ``DeepSpeedStepModel`` gives to planners.
DeepSpeed itself is not imported. It may import ``configuration`` and ``pipeline``.
"""
