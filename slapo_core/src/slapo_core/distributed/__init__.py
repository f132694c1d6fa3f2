"""Agreement between ranks, and random number generators.

Functions of ``agreement`` are collective; those of ``random`` are local. This sub-package may import ``interfaces``,
``modules`` and ``reporting``.
"""
