"""Steps of several sides taken in turns, in processes of their own, and how their times compare.

A step of one side is followed by one of the next, and a ratio is that of such neighbours, of the slowest rank. Equal scripts
differ by some percent from process to process, so there are several rounds, each in new processes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from slapo_testing import run_distributed, shutdown_workers

Step = Callable[[], float]
"""Takes one training step and gives its loss."""


def in_new_processes(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Return the results of ``function(rank, *args)`` on fresh gloo ranks."""
    shutdown_workers()
    return run_distributed(function, ranks, *args, timeout=900)


def check_losses(sides: Sequence[Step], steps: int = 2, limit: float = 2e-5) -> None:
    """Take some steps; a rank that knows no loss gives 0. Collective.

    Raises:
        AssertionError: the sides have losses more than ``limit`` apart.
    """
    for _ in range(steps):
        losses = torch.tensor([step() for step in sides])
        dist.all_reduce(losses, op=dist.ReduceOp.MAX)
        torch.testing.assert_close(losses, losses[:1].expand(len(sides)), atol=limit, rtol=0)


def in_turns(sides: Sequence[Step], turns: int, after: Callable[[], None] = lambda: None) -> list[list[float]]:
    """Seconds of each side's steps on this rank; ``after`` is called at the end of a turn. Collective.

    The order within a turn is drawn, alike on all ranks: what a side follows has a part in its time.
    """
    times: list[list[float]] = [[] for _ in sides]
    drawn = random.Random(0)
    for _ in range(turns):
        for side in drawn.sample(range(len(sides)), len(sides)):
            dist.barrier()
            start = time.perf_counter()
            sides[side]()
            times[side].append(time.perf_counter() - start)
        after()
    return times


def slowest(ranks: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Seconds of each side's steps on the slowest rank of each; given by rank, as ``in_turns`` gave them."""
    return [[max(steps) for steps in zip(*each, strict=True)] for each in zip(*ranks, strict=True)]


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Median ratio of neighbours."""
    return median(one / other for one, other in zip(times, base, strict=True))


def spread(ratios: Sequence[float]) -> str:
    """The median of several rounds, with the lowest and the highest."""
    return f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
