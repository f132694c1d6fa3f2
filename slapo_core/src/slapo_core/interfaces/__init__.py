"""Interfaces that plugins implement: ``Primitive``, ``Dialect``, ``Engine``, and the hook specifications; and
``Program``.

A ``Program`` is the result of a schedule and the only input of a ``Dialect``. May import ``modules`` and
``reporting``.
"""
