"""A pipeline's step against the same stages written by hand on ``torch.distributed.pipelining``, and its bubble.

Run ``python -m benchmarks.engine``; it prints a section for ``benchmarks/README.md``. Both sides run the same GPT blocks with 8
micro-batches, a loss and AdamW. By hand is the shortest script that does it: it neither checks the batch, nor waits with the
optimizer's step until all ranks have their gradients, nor tells the loss to other ranks. A step of one is followed by one of
the other; the ratio of a round is the median of such pairs, of the slowest rank. Equal scripts differ by some percent from
process to process, so there are several rounds in processes of their own, and the script by hand runs twice in each: what
differs between the two is noise.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.peers.rounds import Step, check_losses, in_new_processes, in_turns, ratio, slowest, spread
from benchmarks.sharding import SEQUENCE, blocks
from slapo_core import build, create_schedule
from slapo_torch.timeline import Bubble, bubble

MICROBATCHES, LAYERS, HIDDEN = 8, 8, 256
ADAMW = partial(torch.optim.AdamW, lr=1e-4)
ROUNDS, PAIRS = 3, 4
CASES = [
    (2, "1f1b", 1, 1),
    (2, "interleaved", 2, 1),
    (2, "zbv", 2, 1),
    (4, "1f1b", 1, 1),
    (2, "1f1b", 1, 4),
    (2, "interleaved", 2, 4),
    (2, "zbv", 2, 4),
    (4, "1f1b", 1, 4),
]
"""Ranks, schedule, stages per rank, sequences in a micro-batch."""
BY_HAND = {"1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B", "zbv": "ScheduleZBVZeroBubble"}


def by_hand(kind: str, per_rank: int, x: torch.Tensor, y: torch.Tensor) -> Step:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = ranks * per_rank
    model, size = blocks(HIDDEN, layers=LAYERS), LAYERS // stages
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


def ours(kind: str, per_rank: int, x: torch.Tensor, y: torch.Tensor) -> tuple[Step, Any]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
    model, stages = blocks(HIDDEN, layers=LAYERS), ranks * per_rank
    schedule = create_schedule(model, mesh=mesh, example_inputs={"input": x[: len(x) // MICROBATCHES]})
    schedule.pipeline(stages)
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "pipeline_schedule": kind, "record_timeline": True}
    engine: Any = build(schedule, "torch", optimizer=ADAMW, loss_fn=F.mse_loss, **options)
    return lambda: engine.train_batch(input=x, labels=y).item(), engine


def measure(rank: int, kind: str, per_rank: int, rows: int) -> tuple[list[list[float]], list[Any]]:
    """Seconds of our steps, of those by hand and of those by hand again on this rank, and the timelines of ours."""
    torch.set_num_threads(1)
    x, y = torch.randn(2, MICROBATCHES * rows, SEQUENCE, HIDDEN, generator=torch.Generator().manual_seed(1)).unbind()
    mine, engine = ours(kind, per_rank, x, y)
    sides = [mine, by_hand(kind, per_rank, x, y), by_hand(kind, per_rank, x, y)]
    check_losses(sides)
    timelines: list[Any] = []
    times = in_turns(sides, PAIRS, after=lambda: timelines.append(engine.timeline))
    return times, timelines


def in_one_round(case: tuple[int, str, int, int]) -> tuple[list[float], list[float], list[Bubble]]:
    """Seconds of each side's step, our ratio and that of equal scripts, and the bubbles of our steps."""
    ranks, *rest = case
    found = in_new_processes(measure, ranks, *rest)
    mine, hand, again = slowest([times for times, _ in found])
    ratios = [ratio(side, hand) for side in (mine, again)]
    bubbles = [bubble([action for rank in found for action in rank[1][step]]) for step in range(len(found[0][1]))]
    return [median(mine), median(hand)], ratios, bubbles


def main() -> None:
    """Print the section."""
    what = f"{LAYERS} GPT blocks, hidden size {HIDDEN}, {MICROBATCHES} micro-batches"
    print(f"\n## Pipelines: {what}, gloo, a step with AdamW\n")
    columns = (
        "ranks | schedule | tokens a part | by hand (ms) | slapo (ms) | slapo / by hand | by hand twice | bubble | formula"
    )
    print(f"| {columns} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        rounds = [in_one_round(case) for _ in range(ROUNDS)]
        mine, hand = (median(times[side] for times, _, _ in rounds) for side in (0, 1))
        beside, noise = (spread([ratios[side] for _, ratios, _ in rounds]) for side in (0, 1))
        bubbles = [one for _, _, found in rounds for one in found]
        typical = Bubble(*(median(numbers) for numbers in zip(*bubbles, strict=True)))
        print(
            f"| {case[0]} | {case[1]} | {case[3] * SEQUENCE} | {hand * 1e3:.1f} | {mine * 1e3:.1f} | {beside} | {noise} "
            f"| {100 * typical.measured:.1f} % | {100 * typical.ideal:.1f} % |",
            flush=True,
        )
    print(
        f"\nA part is a micro-batch. Ratios are medians of {ROUNDS} rounds, with the lowest and the highest. The formula's "
        "bubble is that of the schedule's order of actions, each taking its mean time and messages none."
    )


if __name__ == "__main__":
    main()
