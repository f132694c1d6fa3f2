"""Search for the cause of a difference: bisection over the schedule's steps, the first module that differs, known patterns.

Functions take the models, the task and both results, and return a ``Blame``. This sub-package may import ``comparison``,
``model_setup`` and ``ranks``.
"""
