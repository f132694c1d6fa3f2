"""A trial of a schedule: its ranks, a few training steps, and their seconds; or its verification.

In: a ``TrialJob`` and the values of a configuration. Out: one line of JSON, as of any tuned script. The tuner starts
``python -m slapo_tune.measurement.launcher``. Imports ``schedule_space``.
"""
