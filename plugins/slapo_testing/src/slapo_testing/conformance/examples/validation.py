"""Validation of examples, with errors of one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module)


def _are_arguments(value: Any) -> bool:
    return isinstance(value, (tuple, list)) or _is_function(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str) and all(isinstance(name, str) for name in value)


def _is_distance(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < math.inf


def _are_inputs(value: Any) -> bool:
    return isinstance(value, (tuple, list, dict)) or _is_function(value)


FIELD_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_function, "a function that makes one each time, such as its class"),
    "layer": (_is_function, "a function that makes one each time, such as its class"),
    "inputs": (_are_inputs, "a tuple of positional or a dict of keyword arguments, or a function that gives one"),
    "batch": (_is_function, "a function that gives the batch of a step"),
    "path": (lambda value: isinstance(value, str), "a string, '' for the whole model"),
    "args": (_are_arguments, "a tuple, or a function of the schedule that gives one"),
    "kwargs": (lambda value: isinstance(value, Mapping), "a dict"),
    "options": (lambda value: isinstance(value, Mapping), "a dict"),
    "before": (_is_function, "a function of the schedule"),
    "after": (_is_function, "a function of the schedule"),
    "match": (lambda value: isinstance(value, str), "a regular expression, '' for any message"),
    "changes": (_are_names, "a list of words"),
    "plugins": (_are_names, "a list of names of modules"),
    "trust": (_are_names, "a list of names of modules"),
    "atol": (_is_distance, "a finite number from 0 on"),
    "rtol": (_is_distance, "a finite number from 0 on"),
    "ranks": (lambda value: type(value) is int and value >= 1, "a number of processes, 1 or more"),
}
"""Predicate of each field, and its description."""


def check_fields(given: Any, refused: type | None = None) -> None:
    """Check the fields of an example.

    Args:
        given: A dataclass.
        refused: Class of the elements of ``refused``.

    Raises:
        ValueError: a field is invalid.
    """
    kind = type(given).__name__
    for each in fields(given):
        word, value = each.name, getattr(given, each.name)
        if word in FIELD_RULES and value is not each.default and not FIELD_RULES[word][0](value):
            raise ValueError(f"{word} of the {kind} is {_describe(value)}; give {FIELD_RULES[word][1]}")
    if refused is not None and not (
        isinstance(given.refused, (list, tuple)) and all(isinstance(each, refused) for each in given.refused)
    ):
        raise ValueError(f"refused of the {kind} is {_describe(given.refused)}; give a list of {refused.__name__}")


def check_examples_list(kind: str, name: Any, examples: Any, wanted: type) -> list[Any]:
    """Return the examples as a list.

    Args:
        kind: ``"primitive"`` or ``"dialect"``.
        name: Name of the primitive or dialect.
        examples: Its examples.
        wanted: Class of the examples.

    Raises:
        ValueError: not a name, or not examples of that kind.
    """
    if not isinstance(name, str):
        raise ValueError(f"{_describe(name)} is not the name of a {kind}; give the string by which it is registered")
    if isinstance(examples, str) or not isinstance(examples, Iterable):
        raise ValueError(f"examples of the {kind} {name!r} are {_describe(examples)}; give a list of {wanted.__name__}")
    found = [*examples]
    for example in found:
        if not isinstance(example, wanted):
            raise ValueError(f"an example of the {kind} {name!r} is {_describe(example)}; give {wanted.__name__}")
    return found


def _describe(value: Any) -> str:
    """In a few words."""
    is_brief = isinstance(value, (str, int, float, type(None), type))
    short = is_brief or (isinstance(value, (tuple, list)) and len(repr(value)) <= 60)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return repr(value) if short else f"one {type(value).__name__}{shape}"
