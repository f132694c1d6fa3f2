"""Result of ``slapo.estimate``: what each rank holds, sends and computes in one step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slapo_core import SlapoError

from ..hardware import Hardware
from ..simulation import SimulatedStep
from .estimate_text import estimate_lines
from .link_totals import CollectiveTotal, LinkTotal, TrafficMatrix
from .rank_memory import RankMemory
from .report import trace_path, write_page, write_trace


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
class Estimate:
    """Estimate of one training step.

    Args:
        model: Class name of the unmodified model.
        target: Name of the dialect.
        layout: Number of ranks along each mesh axis.
        settings: Options of ``build`` that were given, those that are numbers, strings or flags.
        ranks: Each rank along ``pp``; empty if the schedule cannot be built.
        collectives: Collectives of each rank along ``pp``.
        links: What each rank along ``pp`` sends over each class of links.
        traffic: Bytes from ranks to ranks, or from groups to groups of many ranks; None if the schedule cannot be built.
        problems: Reasons why the step cannot run, one sentence each.
        notes: What the estimate leaves out, one sentence each.
        model_flops: Floating-point operations of all forwards of a step and of their backwards, over all ranks. Gradients that
            no trained parameter needs and recomputation are not counted; what ranks compute alike counts for each.
        dtype: Type in which the forwards compute most of them, whose peak FLOP/s the MFU is a share of.
        hardware: The cluster; None without one.
        time: The replayed step on it; None without hardware.
    """

    model: str
    target: str
    layout: Mapping[str, int]
    settings: Mapping[str, Any]
    ranks: Sequence[RankEstimate] = ()
    collectives: Sequence[CollectiveTotal] = ()
    links: Sequence[LinkTotal] = ()
    traffic: TrafficMatrix | None = None
    problems: Sequence[str] = ()
    notes: Sequence[str] = field(default=())
    model_flops: int = 0
    dtype: torch.dtype = torch.float32
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
        return self.model_flops / (self.time.seconds * ranks * self.hardware.peak_flops(self.dtype))

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain data."""
        found = {
            "model": self.model,
            "target": self.target,
            "layout": dict(self.layout),
            "settings": dict(self.settings),
            "ranks": [_rank_data(each) for each in self.ranks],
            "collectives": [vars(each) | {"link": each.link} for each in self.collectives],
            "links": [vars(each) for each in self.links],
            "traffic": _traffic_data(self.traffic),
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

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a page of memory, simulated step and traffic: one HTML file that loads nothing.

        With hardware, the simulated step is written beside it as a trace: ``plan.trace.json`` for ``plan.html``.

        Args:
            path: File to write, e.g. ``"plan.html"``.

        Raises:
            SlapoError: a file cannot be written.
        """
        data = self.to_dict()
        if self.time is None:
            write_page(path, data)
            return
        trace = trace_path(path)
        data["notes"] += [f"{trace.name} has the simulated step; open it in https://ui.perfetto.dev"]
        write_page(path, data)
        self.save_trace(trace)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the simulated step as a trace for https://ui.perfetto.dev or Chrome's ``about:tracing``.

        A process of the trace is a rank along ``pp``, with tracks for computation, sends and receives.

        Args:
            path: File to write, JSON.

        Raises:
            SlapoError: the estimate has no times since it was made without ``hardware``, or the file cannot be written.
        """
        if self.time is None:
            raise SlapoError("save_trace: the estimate has no times; estimate with hardware=, e.g. hardware='h100'")
        write_trace(path, self.time.timeline())

    def __str__(self) -> str:
        return "\n".join(estimate_lines(self))


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


def _traffic_data(matrix: TrafficMatrix | None) -> dict[str, Any]:
    return {} if matrix is None else {"labels": [*matrix.labels], "bytes": [[*row] for row in matrix.sent]}
