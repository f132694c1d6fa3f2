"""Subjects of a tuning: a schedule of a model, or a training script.

In: the user's model, schedule file or command. Out: a ``Subject``, which declares the symbols of a configuration, runs its
trials in processes of their own, and verifies it. Imports ``measurement``, ``schedule_space``, ``study`` and ``trial``.
"""
