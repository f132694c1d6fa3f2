"""Plain data, which ``torch.load(weights_only=True)`` loads without running code of the file."""

from __future__ import annotations

import hashlib
import io
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core import BuildError


class Position(NamedTuple):
    """Position of a training run.

    Args:
        steps: Batches that were trained.
        extra: What the user gave to ``save``, the same on every rank.
    """

    steps: int
    extra: Any

    def words(self) -> str:
        """Return this rank's values for ``check_same``; raise ``BuildError`` where they are not plain data."""
        check_plain(self.extra, "extra")
        return digest(self.extra)

    @staticmethod
    def check_same(ranks: Iterable[str]) -> None:
        """Raise ``BuildError`` where ranks have said different words."""
        if len(set(ranks)) > 1:
            raise BuildError("the ranks save different extra; give all of them the same, as it is kept once")


_TABLES = (dict, OrderedDict, Counter)
_DEEPEST = 100
"""Limit of nesting, far below Python's recursion limit."""
_LONGEST = 8 * 255 - 1
"""Number of bits of the largest integer that torch loads."""
_SINGLE = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, nn.Parameter, torch.dtype, torch.device, torch.Size)


def check_plain(value: Any, what: str, *within: int) -> None:
    """Refuse values that could not be loaded; ``within`` are the ids of the containers around the value.

    Raises:
        BuildError: an object of another class, a too large integer, a meta tensor, a container that contains itself, or too
            deep nesting.
    """
    kind = type(value)
    if id(value) in within and kind in (*_TABLES, list, tuple):
        raise BuildError(f"{what} is a {kind.__qualname__} that contains itself, which is not saved")
    if len(within) == _DEEPEST:
        raise BuildError(f"{what} has more than {_DEEPEST} lists, tuples or dicts in each other, which are not saved")
    if isinstance(value, torch.Tensor) and value.is_meta:
        raise BuildError(f"{what} has a tensor on the meta device, which has no numbers to save")
    if kind is int and value.bit_length() > _LONGEST:
        raise BuildError(f"{what} has a whole number of {value.bit_length()} bits; up to {_LONGEST} are saved")
    within = (*within, id(value))
    if kind in _TABLES:
        for key, each in value.items():
            check_plain(key, what, *within)
            check_plain(each, f"{what}, {key!r}", *within)
    elif kind in (list, tuple, set):
        for each in value:
            check_plain(each, what, *within)
    elif kind not in _SINGLE:
        raise BuildError(
            f"{what} has a {kind.__module__}.{kind.__qualname__}; only numbers, strings, tensors, lists, tuples, "
            "sets and dicts of these are saved"
        )


def digest(value: Any) -> str:
    """Return a digest of plain data including all bytes of tensors, equal in every process and on every device."""
    kind = type(value)
    parts: list[str]
    if kind in _TABLES:
        parts = [digest(each) for item in value.items() for each in item]
    elif kind in (list, tuple):
        parts = [digest(each) for each in value]
    elif kind is set:  # the order of a set differs between processes
        parts = sorted(digest(each) for each in value)
    elif isinstance(value, torch.Tensor):
        stored = io.BytesIO()
        torch.save(value.detach().cpu().clone(), stored)
        parts = [hashlib.sha256(stored.getvalue()).hexdigest()]
    else:
        parts = [repr(value)]
    return hashlib.sha256("\0".join([kind.__qualname__, *parts]).encode()).hexdigest()
