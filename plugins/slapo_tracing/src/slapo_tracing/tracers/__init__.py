"""The tracers ``"value"``, ``"fx"`` and ``"export"``, and the choice between them.

A module, example inputs and leaf modules enter; a ``TracedModule`` leaves. May import ``graphs``, ``recording`` and
``nodes``.
"""
