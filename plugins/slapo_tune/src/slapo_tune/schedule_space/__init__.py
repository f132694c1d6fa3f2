"""Spaces of schedules: symbols that a schedule file declares or its schedule asks for, and the configurations tried so far.

In: ``space(space)`` and ``schedule(sch, space)`` of a schedule file. Out: values, one configuration at a time. Imports
``search_space`` for the errors of the tuner; does not import optuna.
"""
