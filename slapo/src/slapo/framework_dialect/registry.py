"""Dialects by the names of their frameworks."""

from __future__ import annotations

from slapo_core import default_registry, get_dialect_cls

__all__ = ["get_all_dialects", "get_dialect_cls"]


def get_all_dialects(cls_type: str) -> dict[str, type]:
    """The classes of a classic kind by target, of all dialects that can be imported and have one.

    Args:
        cls_type: As for ``get_dialect_cls``.
    """
    dialects = default_registry().importable("dialect")
    return {target: dialect.classes[cls_type] for target, dialect in dialects.items() if cls_type in dialect.classes}
