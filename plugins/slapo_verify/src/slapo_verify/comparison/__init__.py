"""Comparison of two runs: outputs, loss, gradients and updates under original names, the tolerance for rounding, and
the report. In: two models and a ``Task``. Out: ``Computed`` results, the differences between them, and a
``Report``. It holds the tools for equality of tensors, nested outputs and staged models. May import
``model_setup`` and ``ranks``.
"""
