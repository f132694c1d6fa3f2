"""Names for authors of primitives."""

from slapo_core import Primitive, list_primitives, register_primitive

__all__ = ["Primitive", "list_primitives", "register_primitive"]
