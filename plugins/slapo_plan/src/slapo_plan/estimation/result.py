"""Result of ``slapo.estimate``: what each rank holds, sends and computes in one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..hardware import Hardware
from ..simulation import SimulatedStep
from .rank_memory import RankMemory

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class RankEstimate:
    """One rank along ``pp``; the ranks of the other axes are like it.

    Args:
        rank: Rank along ``pp``.
        count: Number of ranks that are like it.
        stages: Indices of its stages.
        memory: Its memory.
        flops: Floating-point operations of a step, recomputation included.
    """

    rank: int
    count: int
    stages: tuple[int, ...]
    memory: RankMemory
    flops: int


@dataclass(frozen=True)
class CollectiveTotal:
    """Equal collectives of one rank in a step.

    Args:
        kind: As in ``CollectiveRecord``.
        axis: Mesh axis of the group; its ranks if it is no axis.
        nbytes: Bytes of one of them.
        count: Number of them.
        rank: Rank along ``pp`` that issues them.
    """

    kind: str
    axis: str
    nbytes: int
    count: int
    rank: int


@dataclass(frozen=True)
class Estimate:
    """Estimate of one training step.

    Args:
        model: Class name of the unmodified model.
        target: Name of the dialect.
        layout: Number of ranks along each mesh axis.
        settings: Options of ``build`` that differ from their defaults, and the rows of a micro-batch.
        ranks: Each rank along ``pp``; empty if the schedule cannot be built.
        collectives: Collectives of each rank along ``pp``.
        problems: Reasons why the step cannot run, one sentence each.
        notes: What the estimate leaves out, one sentence each.
        model_flops: Floating-point operations of a step over all ranks, recomputation not counted.
        hardware: The cluster; None without one.
        time: The replayed step on it; None without hardware.
    """

    model: str
    target: str
    layout: Mapping[str, int]
    settings: Mapping[str, Any]
    ranks: Sequence[RankEstimate] = ()
    collectives: Sequence[CollectiveTotal] = ()
    problems: Sequence[str] = ()
    notes: Sequence[str] = field(default=())
    model_flops: int = 0
    hardware: Hardware | None = None
    time: SimulatedStep | None = None

    @property
    def peak(self) -> int:
        """Most bytes of any rank; 0 if the schedule cannot be built."""
        return max((each.memory.peak for each in self.ranks), default=0)

    @property
    def flops(self) -> int:
        """Floating-point operations of a step over all ranks, recomputation included."""
        return sum(each.flops * each.count for each in self.ranks)

    @property
    def step_seconds(self) -> float | None:
        """Predicted seconds of a step; None without hardware."""
        return None if self.time is None else self.time.seconds

    @property
    def mfu(self) -> float | None:
        """Share of the peak FLOP/s of all devices, recomputation not counted; None without hardware."""
        if self.time is None or self.hardware is None or not self.time.seconds:
            return None
        ranks = sum(each.count for each in self.ranks)
        peak = self.hardware.peak_flops(_DTYPES.get(str(self.settings.get("precision")), torch.float32))
        return self.model_flops / (self.time.seconds * ranks * peak)

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain data."""
        found = {
            "model": self.model,
            "target": self.target,
            "layout": dict(self.layout),
            "settings": dict(self.settings),
            "ranks": [_rank_data(each) for each in self.ranks],
            "collectives": [vars(each) for each in self.collectives],
            "flops": {"model": self.model_flops, "hardware": self.flops},
            "problems": [*self.problems],
            "notes": [*self.notes],
        }
        return found | self._time_data()

    def _time_data(self) -> dict[str, Any]:
        if self.time is None or self.hardware is None:
            return {}
        seconds = {"compute": self.time.computing, "communication": self.time.communicating, "bubble": self.time.waiting}
        return {
            "hardware": {"name": self.hardware.name, "memory_bytes": self.hardware.usable_bytes},
            "step_seconds": self.time.seconds,
            "mfu": self.mfu,
            "bubble": self.time.bubble,
            "seconds": seconds,
            "timeline": self.time.timeline(),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        layout = " ".join(f"{axis}={size}" for axis, size in self.layout.items() if size > 1) or "one rank"
        yield f"{self.model}, {layout}, target {self.target!r}"
        if self.settings:
            yield ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        for problem in self.problems:
            yield f"cannot run: {problem}"
        if self.ranks:
            yield from _memory_table(self.ranks)
            yield f"{self.flops / 1e12:.4g} TFLOP per step over all ranks, {self.model_flops / 1e12:.4g} without recomputation"
        if self.time is not None and self.hardware is not None:
            limit = self.hardware.usable_bytes
            fits = "fits" if self.peak <= limit else "does not fit"
            yield f"{self.hardware.name}: {fits}, {_size(self.peak)} of {_size(limit)}"
            parts = f"bubble {self.time.bubble:.1%}, MFU {self.mfu:.1%}"
            yield f"step of {self.time.seconds:.4g} s, {parts}, {self.time.communicating:.3g} s of exposed communication"
        for each in self.collectives:
            yield f"pp rank {each.rank}: {each.count} x {each.kind} over {each.axis} of {_size(each.nbytes)}"
        for note in self.notes:
            yield f"note: {note}"


def _rank_data(each: RankEstimate) -> dict[str, Any]:
    return {
        "rank": each.rank,
        "count": each.count,
        "stages": [*each.stages],
        "memory": dict(each.memory.kinds),
        "peak_bytes": each.memory.peak,
        "held_bytes": each.memory.held,
        "when": each.memory.when,
        "flops": each.flops,
    }


def _memory_table(ranks: Sequence[RankEstimate]) -> Iterator[str]:
    kinds = [kind for kind in ranks[0].memory.kinds if any(each.memory.kinds[kind] for each in ranks)]
    rows = [["pp rank", "stages", *kinds, "peak", "at"]]
    for each in ranks:
        sizes = [_size(each.memory.kinds[kind]) for kind in kinds]
        rows.append([str(each.rank), ",".join(map(str, each.stages)), *sizes, _size(each.memory.peak), each.memory.when])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"
