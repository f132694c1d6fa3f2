"""Runs of stages on fake tensors under a recorder, and steps of real engines.

Stages, their arguments and an optimizer enter; ``StageRecord`` s leave. It may import ``recording`` and ``records``. Private
names of torch are in ``_torch_private.py``.
"""
