"""Records of the torch functions that a module calls, to find the line where two runs differ."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from slapo_core import gather_objects
from slapo_tracing.nodes import in_function_transform, is_metadata, model_source, name_of

from ...communication.collectives import Group
from ..value_tracking.tracked_value import tensors_in

_NEAR = 1e-3


class Record(NamedTuple):
    """Tensor that a function returned.

    Args:
        name: Name of the function.
        line: Line of the code that called it.
        shape: Shape of the tensor.
        power: Sum of the squares of its elements.
    """

    name: str
    line: str
    shape: tuple[int, ...]
    power: float


class CallRecords:
    """List of the tensors that torch functions returned in a run, in order."""

    def __init__(self) -> None:
        self.made: list[Record] = []

    def __call__(self, func: Any, result: Any) -> None:
        """Add the result of a function, or the inputs of a layer."""
        name = name_of(func)
        if is_metadata(func, name) or in_function_transform():
            return
        line = model_source() or "an unknown line"
        for x in tensors_in(result):
            power = float(x.detach().abs().to(torch.float64).nan_to_num(0, 0, 0).square().sum())
            self.made.append(Record(name, line, tuple(x.shape), power))


def first_difference(parts: CallRecords, whole: CallRecords, group: Group) -> str:
    """Return the line of the first tensor that is no shard of the whole run's. Collective over the group."""
    gathered: list[list[Record]] = gather_objects(parts.made, None, group)
    everywhere = [list(made) for made in zip(*gathered, strict=False)]
    line = "an unknown line"
    for made, expected in zip_longest(everywhere, whole.made):
        if made is None or expected is None:
            return line
        line = str(made[0].line)
        if any((each.name, each.line) != (expected.name, expected.line) for each in made):
            return line
        total = sum(each.power for each in made)
        if made[0].shape == expected.shape:
            total /= len(made)
            fits = all(_is_near(each.power, expected.power) for each in made)
        else:
            fits = _is_part(made[0].shape, expected.shape, len(made))
        if not fits or not _is_near(total, expected.power):
            return line
    return line


def _is_near(one: float, other: float) -> bool:
    return abs(one - other) <= _NEAR * max(abs(one), abs(other))


def _is_part(shape: tuple[int, ...], whole: tuple[int, ...], ranks: int) -> bool:
    pairs = list(zip(shape, whole, strict=False))
    return len(shape) == len(whole) and all(size == of or size * ranks == of for size, of in pairs)
