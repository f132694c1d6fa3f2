"""Numeric probe of an optimizer: the elements that the update of one element depends on.

Copies of the optimizer step a few small parameters, whole and in parts, together and apart. An optimizer enters; an
``UpdateDependence`` leaves. Neither the optimizer nor the random state of the process changes. It may import
``introspection``, ``gradient_hooks`` and the private torch names in ``distributed``.
"""

from .update_probe import is_step_divisible

__all__ = ["is_step_divisible"]
