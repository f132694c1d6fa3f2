"""Interfaces that plugins implement, and ``Program``, the only input of a ``Dialect``.

``Primitive``, ``Dialect``, ``Engine`` and ``Codec`` are abstract classes. This sub-package may import ``modules`` and
``reporting``.
"""
