"""Numeric probe of an optimizer: the elements that the update of one element depends on.

Copies of the optimizer step a few small parameters, whole and in parts, together and apart. An optimizer enters; an
``UpdateDependence`` leaves. Neither the optimizer nor the random state of the process changes. ``introspection`` reads and
rewrites the tables of an optimizer of any class. It may import ``gradient_hooks`` and the private torch names in
``distributed``.
"""

from .introspection import OneStep, groups_in, replace_parameters
from .update_probe import is_step_divisible

__all__ = ["OneStep", "groups_in", "is_step_divisible", "replace_parameters"]
