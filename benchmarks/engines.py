"""Our dialects for DeepSpeed and Megatron against the same model written by hand for these engines.

Run ``python -m benchmarks.engines``; it prints a section for ``benchmarks/README.md``. Two gloo ranks train a small
transformer: with tensor parallelism, its linears split by hand or by a schedule, and as a pipeline of two stages, 1F1B. The
script by hand runs twice in each round; what differs between the two is noise.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pkgutil import resolve_name
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peers.models import Language, Sizes, adamw, batch_of, cut_blocks, loss_of, shard_blocks
from benchmarks.peers.rounds import Step, check_losses, in_new_processes, in_turns, ratio, slowest, spread
from slapo_core import build, create_schedule

ROUNDS, TURNS = 3, 5
BY_HAND = {"deepspeed": "benchmarks.peers.deepspeed_by_hand"}
AXES = {"tp": "tensor_parallel", "pp": "pipeline"}


def ours(target: str, axis: str, sizes: Sizes) -> Step:
    """An unmodified model, a schedule, and the engine."""
    ranks, (tokens, labels) = dist.get_world_size(), batch_of(sizes)
    mesh = init_device_mesh(
        "cpu", tuple(ranks if axis == name else 1 for name in ("pp", "dp", "tp")), mesh_dim_names=("pp", "dp", "tp")
    )
    schedule = create_schedule(Language(sizes), mesh=mesh, example_inputs={"tokens": tokens[: sizes.rows]})
    if axis == "tp":
        shard_blocks(schedule)
    else:
        cut_blocks(schedule, ranks, sizes.layers)
    engine: Any = build(schedule, target, optimizer=adamw, loss_fn=loss_of, microbatches=sizes.microbatches)
    return lambda: float(engine.train_batch(tokens=tokens, labels=labels))


def measure(rank: int, target: str, axis: str, sizes: Sizes, turns: int) -> list[list[float]]:
    """Seconds of our steps, of those by hand and of those by hand again, on this rank."""
    torch.set_num_threads(1)
    hand: Callable[[Sizes], Step] = resolve_name(f"{BY_HAND[target]}:{AXES[axis]}")
    with redirect_stdout(io.StringIO()):  # what the engines print as they start
        sides = [ours(target, axis, sizes), hand(sizes), hand(sizes)]
    check_losses(sides)
    return in_turns(sides, turns)


def report_steps(sizes: Sizes, rounds: int, turns: int) -> None:
    """The table of steps."""
    batch = f"{sizes.microbatches} micro-batches of {sizes.rows * sizes.sequence} tokens"
    print(f"\n## Engines: {sizes.layers} GPT blocks, hidden size {sizes.hidden}, {batch}, a step with AdamW in fp32")
    print("\n| engine | layout | by hand (ms) | slapo (ms) | slapo / by hand | by hand twice |")
    print("|---|---|---|---|---|---|")
    for target in BY_HAND:
        for axis in AXES:
            found = [slowest(in_new_processes(measure, 2, target, axis, sizes, turns)) for _ in range(rounds)]
            mine, hand = (median([median(one[side]) for one in found]) for side in (0, 1))
            ratios, noise = (spread([ratio(one[side], one[1]) for one in found]) for side in (0, 2))
            print(f"| {target} | {axis} 2 | {hand * 1e3:.1f} | {mine * 1e3:.1f} | {ratios} | {noise} |", flush=True)
    print(f"\nOf 2 gloo ranks. Ratios are medians of {rounds} rounds in new processes, with the lowest and the highest.")


def main() -> None:
    """Print the section; with ``--small`` of a tiny model, to see whether all runs."""
    if "--small" in sys.argv[1:]:
        report_steps(Sizes(hidden=64, layers=4, vocabulary=128, rows=2, sequence=32), rounds=1, turns=1)
    else:
        report_steps(Sizes(), ROUNDS, TURNS)


if __name__ == "__main__":
    main()
