"""Our dialects for DeepSpeed and Megatron against the same model written by hand for these engines.

Run ``python -m benchmarks.engines``; it prints a section for ``benchmarks/README.md``. Two gloo ranks train a small
transformer: with tensor parallelism, its linears split by hand or by a schedule, and as a pipeline of two stages, 1F1B. The
script by hand runs twice in each round: what differs between the two is noise, and ours is compared with the mean of both.
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

from benchmarks.peers.borders import HIDDEN, Costs, measure_border
from benchmarks.peers.building import LAYERS, Seconds, measure_build
from benchmarks.peers.models import CLIP, Language, Sizes, adamw, batch_of, cut_blocks, loss_of, mesh_of, shard_blocks
from benchmarks.peers.rounds import Step, check_losses, in_new_processes, in_turns, ratio, slowest, spread
from slapo_core import build, create_schedule
from slapo_training.engines import without_warnings

ROUNDS, TURNS = 5, 10
BY_HAND = {name: f"benchmarks.peers.{name}_by_hand" for name in ("deepspeed", "megatron")}
AXES = {"tp": "tensor_parallel", "pp": "pipeline"}


def ours(target: str, axis: str, sizes: Sizes) -> Step:
    """An unmodified model, a schedule, and the engine."""
    mesh, (tokens, labels) = mesh_of(axis), batch_of(sizes)
    schedule = create_schedule(Language(sizes), mesh=mesh, example_inputs={"tokens": tokens[: sizes.rows]})
    if axis == "tp":
        shard_blocks(schedule)
    else:
        cut_blocks(schedule, mesh["pp"].size(), sizes.layers)
    engine: Any = build(schedule, target, optimizer=adamw, loss_fn=loss_of, microbatches=sizes.microbatches, clip=CLIP)
    return lambda: float(engine.train_batch(tokens=tokens, labels=labels))


def measure(rank: int, target: str, axis: str, sizes: Sizes, turns: int) -> list[list[float]]:
    """Seconds of steps by hand, of ours, and of those by hand again, on this rank."""
    torch.set_num_threads(1)
    hand: Callable[[Sizes], Step] = resolve_name(f"{BY_HAND[target]}:{AXES[axis]}")
    with redirect_stdout(io.StringIO()), without_warnings():  # what the engines say as they start
        # in the middle, as what is made later has other memory
        sides = [hand(sizes), ours(target, axis, sizes), hand(sizes)]
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
            hand, mine = (median([median(one[side]) for one in found]) for side in (0, 1))
            ratios = spread([ratio(one[1], _means(one[0], one[2])) for one in found])
            noise = spread([ratio(one[2], one[0]) for one in found])
            print(f"| {target} | {axis} 2 | {hand * 1e3:.1f} | {mine * 1e3:.1f} | {ratios} | {noise} |", flush=True)
    print(f"\nOf 2 gloo ranks. Ratios are medians of {rounds} rounds in new processes, with the lowest and the highest.")
    print("Megatron-Core runs in its CPU mode on both sides, which adds to each call of torch.")


def _means(steps: list[float], others: list[float]) -> list[float]:
    return [(one + other) / 2 for one, other in zip(steps, others, strict=True)]


def report_borders() -> None:
    """The table of what crosses."""
    print("\nA boundary of a pipeline: hidden states with gradient, a mask of truth values, and None. Megatron-Core sends one")
    print("tensor, into which all bytes are copied:\n")
    print("| engine | hidden states | pack (us) | unpack (us) | both (us) | one copy of the bytes (us) |")
    print("|---|---|---|---|---|---|")
    for target in BY_HAND:
        for size, shape in HIDDEN.items():
            costs: Costs = in_new_processes(measure_border, 1, target, shape)[0]
            figures = " | ".join(f"{figure:.1f}" for figure in costs[:4])
            print(f"| {target} | {size}, {shape} | {figures} |", flush=True)


def report_builds() -> None:
    """The table of how long it takes to build."""
    print(f"\n`build` of a GPT-2 with {LAYERS} layers, the first of 2 new processes, engines imported:\n")
    print("| engine | layout | its schedule (s) | build (s) | the engine's own start in it (s) | the rest (s) |")
    print("|---|---|---|---|---|---|")
    for target in BY_HAND:
        for axis in AXES:
            worst: Seconds = max(in_new_processes(measure_build, 2, target, axis), key=lambda one: one.build - one.engine)
            rest = worst.build - worst.engine
            print(
                f"| {target} | {axis} 2 | {worst.schedule:.2f} | {worst.build:.2f} | {worst.engine:.2f} | {rest:.2f} |",
                flush=True,
            )


def main() -> None:
    """Print the section; with ``--small`` of a tiny model, to see whether all runs."""
    if "--small" in sys.argv[1:]:
        report_steps(Sizes(hidden=64, layers=4, vocabulary=128, rows=2, sequence=32), rounds=1, turns=1)
    else:
        report_steps(Sizes(), ROUNDS, TURNS)
    report_borders()
    report_builds()


if __name__ == "__main__":
    main()
