"""The schedule, and the path of each step through it: checks, transaction, journal, files.

``create_schedule`` takes a model. Each step changes the live module tree in a transaction and is recorded in the journal, which
can be undone, saved and replayed. This sub-package may import ``registration``, ``distributed``, ``interfaces``, ``modules``
and ``reporting``.
"""
