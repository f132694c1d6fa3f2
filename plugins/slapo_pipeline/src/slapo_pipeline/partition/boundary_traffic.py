"""Bytes that cross each boundary of a program with every micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slapo_core import Boundary, Program


@dataclass(frozen=True)
class BoundaryValues:
    """The values that cross one boundary with every micro-batch.

    Args:
        values: Sent by one stage to the next, in order.
    """

    values: tuple[Boundary, ...]

    @property
    def forward(self) -> int:
        """Bytes of the values."""
        return sum(map(value_bytes, self.values))

    @property
    def backward(self) -> int:
        """Bytes of their gradients."""
        return sum(value_bytes(value) for value in self.values if value.requires_grad)


@dataclass(frozen=True)
class Traffic:
    """The values that cross the boundaries of a program; ``str`` gives a table.

    Args:
        boundaries: In order; the first lies between stages 0 and 1.
    """

    boundaries: tuple[BoundaryValues, ...]

    def __str__(self) -> str:
        rows = [("stages", "forward", "backward", "values")]
        for index, crossed in enumerate(self.boundaries):
            values = ", ".join(f"{value.name}{list(value.shape)}" for value in crossed.values)
            rows.append((f"{index} -> {index + 1}", f"{crossed.forward:,} B", f"{crossed.backward:,} B", values))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            f"{name:<{widths[0]}}  {forward:>{widths[1]}}  {backward:>{widths[2]}}  {values}"
            for name, forward, backward, values in rows
        )


def boundary_bytes(program: Program) -> Traffic:
    """Return the bytes that one micro-batch of the program's input shapes sends over each boundary, forward and backward."""
    return Traffic(tuple(BoundaryValues(stage.inputs) for stage in program.stages[1:]))


def value_bytes(value: Boundary) -> int:
    return math.prod(value.shape) * value.dtype.itemsize
