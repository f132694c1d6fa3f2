"""The trials of a tuning in an Optuna storage: claims, results, and their classic records.

In: ``database``, the path of a classic ``Database``, the URL of an Optuna storage, or nothing. Out: ``TrialResult`` records
that several tuners share. Imports ``schedule_space`` and ``database``; optuna is imported here and in ``sampling`` alone.
"""
