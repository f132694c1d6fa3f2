"""Sections of pages, and tables of settings whose values have the unit that their name says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..tables import table
from ..units import format_bytes, format_flops, format_percent, format_seconds

_UNITS = {"bytes": format_bytes, "seconds": format_seconds, "flops": format_flops, "share": format_percent}


def section(title: str, *parts: str) -> str:
    """Return a section with those of its parts that are not empty; nothing if all are."""
    body = "\n".join(part for part in parts if part)
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def settings_table(head: tuple[str, str], values: Mapping[str, Any]) -> str:
    """Return a table of names and values; nothing if there are no values.

    Args:
        head: Titles of the two columns.
        values: Name to value; None is left out. Names that end in ``bytes``, ``seconds``, ``flops`` or ``share`` tell the
            unit of a number, and lose it.
    """
    rows = [_setting_row(name, value) for name, value in values.items() if value is not None]
    return table(head, rows, "words") if rows else ""


def _setting_row(name: str, value: Any) -> tuple[str, str]:
    stem, _, unit = name.rpartition("_")
    if unit in _UNITS and stem and _is_number(value):
        return stem.replace("_", " "), _UNITS[unit](value)
    return name.replace("_", " "), _UNITS[name](value) if name in _UNITS and _is_number(value) else format_value(value)


def format_value(value: Any) -> str:
    """Return a setting as words: ``yes`` and ``no``, lists with commas, nested settings as ``name value``."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {format_value(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_value, value))
    return str(value)


def sentences(texts: Sequence[str]) -> str:
    """Return a list of sentences, equal ones once with their number; nothing if there are none."""
    counts = Counter(map(str, texts))
    items = "".join(f"<li>{escape(text)}{f' ({count} times)' if count > 1 else ''}</li>" for text, count in counts.items())
    return f'<ul class="sentences">{items}</ul>' if items else ""


def verdict(good: bool, lead: str, words: str = "", below: str = "") -> str:
    """Return the sentence at the head of a page, green or red.

    Args:
        good: True for green.
        lead: Its first words, in bold; escaped.
        words: Its other words; escaped.
        below: HTML after the sentence.
    """
    style = "good" if good else "bad"
    return f'<div class="verdict {style}"><b>{escape(lead)}</b>{escape(words)}{below}</div>'


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
