"""Estimate of one training step: memory of each rank, traffic, floating-point operations and time.

``stage_records`` runs each distinct stage once, ``rank_memory`` puts them together in the order of the engine's actions,
``estimate`` is the entry, and ``result`` what it returns. A schedule and the options of ``build`` enter; an ``Estimate``
leaves.
"""
