"""Dialects by the names of their frameworks."""

from __future__ import annotations

from typing import Any

from slapo_core import Dialect, Engine, PlainEngine, Registry, Schedule, UnknownNameError, build, default_registry

__all__ = ["get_all_dialects", "get_dialect_cls", "init_target_engine"]


def get_all_dialects(cls_type: str) -> dict[str, type]:
    """The classes of a classic kind by target, of all dialects that can be imported and have one.

    Args:
        cls_type: As for ``get_dialect_cls``.
    """
    dialects = default_registry().load_all("dialect")
    return {target: dialect.classes[cls_type] for target, dialect in dialects.items() if cls_type in dialect.classes}


def init_target_engine(sch: Schedule, target: str | None, **kwargs: Any) -> Engine:
    """The established name of ``build``: ``model, optimizer = init_target_engine(sch, "torch", optimizer=...)``."""
    return build(sch, target, **kwargs)


def get_dialect_cls(
    cls_type: str, target: str | None, allow_none: bool = False, plugins: Registry | None = None
) -> type | None:
    """A dialect's class of a classic kind.

    Args:
        cls_type: One of ``"pipeline_stage"``, ``"pipeline_engine"``, ``"runtime_engine"``, ``"log_parser"``.
        target: Name of the dialect; None is the plain one, whose only class is the ``"runtime_engine"``.
        allow_none: Take the plain one where there is no such dialect, and give None where there is no such class.
        plugins: Registry to look in; default: all installed plugins.

    Raises:
        UnknownNameError: no such dialect or class, without ``allow_none``.
    """
    try:
        dialect: type[Dialect] = (plugins or default_registry()).get("dialect", target or "None")
    except UnknownNameError:
        if not allow_none and (target is not None or cls_type != "runtime_engine"):
            raise
        return PlainEngine if cls_type == "runtime_engine" else None
    if cls_type not in dialect.classes and not allow_none:
        raise UnknownNameError.of("dialect class", cls_type, dialect.classes, whose=f"target {dialect.name!r}")
    return dialect.classes.get(cls_type)
