"""Codec of matches: nodes by name, with the pattern if it can be imported."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import fx

from slapo_core import Codec, Schedule

from .matcher import match, match_data


class MatchCodec(Codec):
    """Codec of a list of (path, node) pairs, as ``find`` returns."""

    name: ClassVar[str] = "$match"
    module: ClassVar[str] = "slapo_tracing"
    optional: ClassVar[frozenset[str]] = frozenset({"pattern"})

    @staticmethod
    def fits(value: Any) -> bool:
        is_list = isinstance(value, list) and bool(value)
        return is_list and all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], fx.Node) for item in value)

    @staticmethod
    def parts(value: Any) -> dict[str, Any]:
        return {**match_data(value), "pattern": getattr(getattr(value, "pattern", None), "source", None)}

    @staticmethod
    def build(parts: dict[str, Any], schedule: Schedule) -> Any:
        return match(schedule, parts)

    @staticmethod
    def source(parts: str) -> str:
        return f"slapo_tracing.match(sch, {parts})"
