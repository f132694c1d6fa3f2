"""Choice of the next configuration: the order of a plan, corrected by what the trials measured.

In: the trials of a study, and a ``SearchPlan``. Out: values by symbol, as an Optuna sampler. Imports ``schedule_space`` and
``study``.
"""
