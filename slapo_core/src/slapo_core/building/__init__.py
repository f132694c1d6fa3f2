"""From a schedule to an engine: default mesh, program, meta weights, dialect.

``build`` takes a ``Schedule`` and returns an ``Engine`` on every rank, or raises the same error on every rank. This sub-package
may import every other one except ``primitives``.
"""
