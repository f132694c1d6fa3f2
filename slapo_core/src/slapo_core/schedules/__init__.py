"""The schedule, and the path of every step through it: checks, transaction, journal, files.

A model enters through ``create_schedule``. Each step changes the live module tree in a transaction and is recorded in
the journal, which can be undone, saved and replayed. May import ``registration``, ``distributed``, ``interfaces``,
``modules`` and ``reporting``.
"""
