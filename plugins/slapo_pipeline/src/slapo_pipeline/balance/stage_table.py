"""Table of a model's stages: modules, parameters, costs and received bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True)
class StageRow:
    """One stage, for the example inputs as one micro-batch.

    Args:
        first: Path of the first module it runs.
        last: Path of the last.
        parameters: Number of elements of its parameters; a shared parameter counts in each of its stages.
        parameter_bytes: Bytes of its parameters.
        cost: The balanced cost: bytes of the parameters that are used here first, FLOPs of a forward, or bytes of memory.
        received: Bytes it receives from the stage before.
    """

    first: str
    last: str
    parameters: int
    parameter_bytes: int
    cost: int
    received: int


@dataclass(frozen=True)
class StageTable:
    """The stages in order; printed as a table.

    Args:
        balance: Kind of the costs: ``"parameters"``, ``"flops"`` or ``"memory"``.
        stages: One row per stage.
        cuts: Paths of the modules that end all stages but the last.
    """

    balance: str
    stages: tuple[StageRow, ...]
    cuts: tuple[str, ...]

    def __str__(self) -> str:
        cost = {"flops": "forward FLOPs", "memory": "memory"}.get(self.balance)
        rows = [["stage", "from", "to", "parameters", "their size", *([cost] if cost else []), "receives"]]
        for index, stage in enumerate(self.stages):
            words = [
                str(index),
                stage.first,
                stage.last,
                _with_prefix(stage.parameters),
                f"{_with_prefix(stage.parameter_bytes)}B",
            ]
            words += [_with_prefix(stage.cost) + ("B" if self.balance == "memory" else "")] if cost else []
            rows.append([*words, f"{_with_prefix(stage.received)}B"])
        return "\n".join(_lines(rows))


def _with_prefix(amount: int) -> str:
    """Format a number with three digits and a decimal prefix: ``1.23 M``."""
    value, prefix = float(amount), 0
    while value >= 999.5 and prefix + 1 < len(_PREFIXES):
        value, prefix = value / 1000, prefix + 1
    return f"{value:.3g} {_PREFIXES[prefix]}"


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ">", "<", "<", *(">" for _ in widths[3:])
    return ["  ".join(f"{word:{side}{width}}" for word, side, width in zip(row, sides, widths, strict=True)) for row in rows]
