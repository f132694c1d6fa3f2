"""Estimate of one training step: memory of each rank, traffic, floating-point operations and time.

``stage_records`` runs each distinct stage once, ``rank_memory`` puts them together in the order of the engine's actions,
``traffic`` sums what ranks send over links, ``estimate`` is the entry, and ``result`` what it returns, with its page and its
trace. A schedule and the options of ``build`` enter; an ``Estimate`` leaves.
"""
