"""Search for the cause of a difference: bisection over the steps of the schedule, the first module that differs, and
known patterns. In: the models, the task and both results. Out: a ``Blame``. May import ``comparison``,
``model_setup`` and ``ranks``.
"""
