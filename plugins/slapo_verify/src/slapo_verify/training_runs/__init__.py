"""Training steps to compare: by an engine on its ranks, and by the unmodified model in plain torch on the full batch.

Functions take a model, a batch, an optimizer factory and the options of ``build``, and return ``TrainingResults`` with losses
and updates by original name. This sub-package may import ``comparison``, ``model_setup`` and ``ranks``.
"""
