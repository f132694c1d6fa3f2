"""One file per model family: ``schedule(sch, **options)`` takes the steps of its ready schedule. In: a schedule and
the classic configuration names. Out: the same schedule with steps in its journal. May import ``shared_steps``.
"""
