"""DeepSpeed's memory of a training step, on fake tensors: ZeRO's flat tensors, buckets, gathered parameters, pipeline buffers.

Options and the parameters of a stage enter; a ``StageMemory`` leaves, which ``stage_runner.py`` above gives to planners.
DeepSpeed itself is not imported. It may import ``configuration``.
"""
