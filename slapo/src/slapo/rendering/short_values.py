"""Values in a few characters: arguments of steps, options, counts."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

_PLAIN_WORD = re.compile(r"[\w.*/-]+")
_NUM_ENTRIES = 3
_LENGTH = 60


def printable(text: str) -> str:
    """Return the text with escapes for all that would move a terminal's cursor or colour it."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def truncate(text: str, length: int = _LENGTH) -> str:
    """Return the text on one line, cut off at ``length`` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= length else f"{line[: length - 3]}..."


def short_value(value: Any) -> str:
    """Return a value as a reader recognises it, not as Python would read it. No foreign ``__repr__`` is called."""
    if isinstance(value, str):
        return truncate(str(value) if _PLAIN_WORD.fullmatch(value) else repr(str(value)))
    if value is None or type(value) in (bool, int, float, complex, torch.dtype):
        return repr(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}()"
    if isinstance(value, partial):
        return truncate(short_call(short_value(value.func), value.args, value.keywords))
    if isinstance(value, type) or inspect.isroutine(value):
        return printable(value.__name__)
    if isinstance(value, Mapping):
        return _enclose("{}", [f"{short_value(key)}: {short_value(part)}" for key, part in _head(value.items())], len(value))
    if isinstance(value, (list, tuple, set, frozenset)):
        return _enclose("()" if isinstance(value, tuple) else "[]", map(short_value, _head(value)), len(value))
    return f"<{type(value).__name__}>"


def short_call(name: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a call without quotes: ``shard(weight, axis=0)``; no parentheses where there are no arguments."""
    words = [*map(short_value, args), *(f"{key}={short_value(value)}" for key, value in kwargs.items())]
    return f"{name}({', '.join(words)})" if words else name


def short_count(count: int) -> str:
    """Return a count in three digits: ``1.23 M``."""
    if count < 1000:
        return str(count)
    value, units = float(count), iter("kMBT")
    unit = ""
    while value >= 999.5 and (larger := next(units, "")):
        value, unit = value / 1000, larger
    return f"{value:#.3g}".rstrip(".") + f" {unit}"


def format_count(count: int, noun: str) -> str:
    """Return a count and its noun: ``1 step``, ``2 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_tally(names: Iterable[str]) -> str:
    """Return how often each name is there: ``checkpoint, 4 shard``."""
    return ", ".join(f"{count:,} {name}" if count > 1 else name for name, count in Counter(names).items())


def join_first(words: Iterable[str], limit: int = 4) -> str:
    """Return the first words and the number of the others: ``a, b and 7 more``."""
    known = list(words)
    return ", ".join(known[:limit]) + (f" and {len(known) - limit} more" if len(known) > limit else "")


def _head(values: Iterable[Any]) -> list[Any]:
    return [value for value, _ in zip(values, range(_NUM_ENTRIES), strict=False)]


def _enclose(brackets: str, words: Iterable[str], length: int) -> str:
    inner = ", ".join([*words, *(["..."] if length > _NUM_ENTRIES else [])])
    return truncate(f"{brackets[0]}{inner}{brackets[1]}")
