"""A pipeline's step against the same stages written by hand on ``torch.distributed.pipelining``, and its bubble.

Run ``python -m benchmarks.engine``; it prints a section for ``benchmarks/README.md``. Both sides run the same GPT blocks with 8
micro-batches, a loss and AdamW. By hand is the shortest script that does it: it neither checks the batch nor tells the loss to
the other ranks. A step of one is followed by a step of the other; ratios are medians of such pairs, of the slowest rank. The
bubbles are of further steps, whose timeline is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.sharding import SEQUENCE, blocks
from slapo_core import build, create_schedule
from slapo_core.testing import run_distributed
from slapo_torch.timeline import Bubble, bubble

MICROBATCHES, LAYERS = 8, 8
ADAMW = partial(torch.optim.AdamW, lr=1e-4)
CASES = [
    (2, "1f1b", 1, 256, 40),
    (2, "1f1b", 1, 512, 20),
    (4, "1f1b", 1, 256, 30),
    (2, "interleaved", 2, 256, 40),
    (2, "zbv", 2, 256, 40),
]
"""Ranks, schedule, stages per rank, hidden size, pairs of steps."""
BY_HAND = {"1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B", "zbv": "ScheduleZBVZeroBubble"}

Step = Callable[[], float]


def by_hand(kind: str, per_rank: int, hidden: int, x: torch.Tensor, y: torch.Tensor) -> Step:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = ranks * per_rank
    model, size = blocks(hidden, layers=LAYERS), LAYERS // stages
    mine = [rank, 2 * ranks - 1 - rank] if kind == "zbv" else [rank + ranks * turn for turn in range(per_rank)]
    parts = {index: model[index * size : (index + 1) * size] for index in mine}
    made = [pipelining.PipelineStage(part, index, stages, torch.device("cpu")) for index, part in parts.items()]
    of = getattr(pipelining, BY_HAND[kind])
    schedule = of(made[0] if kind == "1f1b" else made, MICROBATCHES, loss_fn=F.mse_loss)
    optimizer = ADAMW([parameter for part in parts.values() for parameter in part.parameters()])
    has_last = stages - 1 in mine

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(*([x] if rank == 0 else []), target=y if has_last else None, losses=losses if has_last else None)
        optimizer.step()
        return torch.stack(losses).mean().item() if has_last else 0.0

    return step


def ours(kind: str, per_rank: int, hidden: int, x: torch.Tensor, y: torch.Tensor, timeline: bool) -> tuple[Step, Any]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
    model, stages = blocks(hidden, layers=LAYERS), ranks * per_rank
    schedule = create_schedule(model, mesh=mesh, example_inputs={"input": x[: len(x) // MICROBATCHES]})
    schedule.pipeline(stages)
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "pipeline_schedule": kind, "record_timeline": timeline}
    engine: Any = build(schedule, "torch", optimizer=ADAMW, loss_fn=F.mse_loss, **options)
    return lambda: engine.train_batch(input=x, labels=y).item(), engine


def measure(rank: int, kind: str, per_rank: int, hidden: int, pairs: int) -> tuple[list[float], list[float], list[Any]]:
    """Seconds of our steps and of those by hand on this rank, and the timelines of ours."""
    torch.set_num_threads(1)
    x, y = torch.randn(2, MICROBATCHES, SEQUENCE, hidden, generator=torch.Generator().manual_seed(1)).unbind()
    (mine, _), hand = ours(kind, per_rank, hidden, x, y, False), by_hand(kind, per_rank, hidden, x, y)
    watched, engine = ours(kind, per_rank, hidden, x, y, True)
    for _ in range(3):
        losses = torch.tensor([mine(), hand()])
        dist.all_reduce(losses, op=dist.ReduceOp.MAX)
        torch.testing.assert_close(losses[0], losses[1])
    times: tuple[list[float], list[float]] = ([], [])
    timelines = []
    for pair in range(pairs):
        for side, step in sorted(enumerate((mine, hand)), key=lambda numbered: (numbered[0] + pair) % 2):
            dist.barrier()
            start = time.perf_counter()
            step()
            times[side].append(time.perf_counter() - start)
    for _ in range(pairs // 2):
        dist.barrier()
        watched()
        timelines.append(engine.timeline)
    return *times, timelines


def main() -> None:
    """Print the section."""
    print(f"\n## Pipelines: {LAYERS} GPT blocks, {MICROBATCHES} micro-batches, gloo, a step with AdamW\n")
    print("| ranks | schedule | hidden | by hand (ms) | slapo (ms) | slapo / by hand | bubble | its formula |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks, kind, per_rank, hidden, pairs in CASES:
        found = run_distributed(measure, ranks, kind, per_rank, hidden, pairs, timeout=900)
        mine, hand = ([max(steps) for steps in zip(*(rank[side] for rank in found), strict=True)] for side in (0, 1))
        ratio = median(one / other for one, other in zip(mine, hand, strict=True))
        bubbles = [bubble([action for rank in found for action in rank[2][step]]) for step in range(len(found[0][2]))]
        typical = Bubble(*(median(numbers) for numbers in zip(*bubbles, strict=True)))
        print(
            f"| {ranks} | {kind} | {hidden} | {median(hand) * 1e3:.1f} | {median(mine) * 1e3:.1f} | {ratio:.3f} "
            f"| {100 * typical.measured:.1f} % | {100 * typical.ideal:.1f} % |",
            flush=True,
        )
    print("\nThe formula's bubble is that of the schedule's order of actions, each taking its mean time and messages none.")


if __name__ == "__main__":
    main()
