"""Muon's step at tp 2: each matrix on one owner, against every rank stepping all whole matrices.

Run ``python -m benchmarks.optimizers``; it prints a section for ``benchmarks/README.md``. The matrices are those of GPT blocks,
sharded over two gloo ranks. By hand each rank gathers values and gradients of all matrices, steps ``torch.optim.Muon`` on the
whole ones, and keeps its parts: the shortest script that is right. Only the optimizer's step is timed, on gradients that stay
the same. A step of one side is followed by one of the other; the ratio of a round is the median of such pairs, of the slowest
rank.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peers.rounds import Step, in_new_processes, in_turns, ratio, slowest, spread
from benchmarks.sharding import SEQUENCE, blocks
from slapo_core import build, create_schedule
from slapo_core.parameters import ShardSpec, shard_spec

RANKS, LAYERS, ROUNDS, PAIRS = 2, 4, 3, 5
HIDDEN = (256, 512)
MUON = partial(torch.optim.Muon, lr=1e-3)


def matrices(parameters: Any) -> torch.optim.Optimizer:
    return MUON([parameter for parameter in parameters if parameter.dim() == 2])


def by_hand(parameters: list[nn.Parameter]) -> Step:
    """Every rank steps all."""
    held: list[tuple[nn.Parameter, ShardSpec]] = [(each, spec) for each in parameters if (spec := shard_spec(each)) is not None]
    wholes = [nn.Parameter(each.new_empty(spec.full_shape)) for each, spec in held]
    optimizer = MUON(wholes)

    def gathered(tensor: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(spec.num_shards)]
        dist.all_gather(parts, tensor.detach().contiguous(), group=spec.group)
        return spec.assemble(parts)

    def step() -> float:
        for (parameter, spec), each in zip(held, wholes, strict=True):
            assert parameter.grad is not None
            each.data, each.grad = gathered(parameter, spec), gathered(parameter.grad, spec)
        optimizer.step()
        with torch.no_grad():
            for (parameter, spec), each in zip(held, wholes, strict=True):
                parameter.copy_(spec.local(each))
        return 0.0

    return step


def measure(rank: int, hidden: int) -> list[list[float]]:
    """Seconds of our steps, of those by hand and of those by hand again on this rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 1, RANKS), mesh_dim_names=("pp", "dp", "tp"))
    x, y = torch.randn(2, 1, SEQUENCE, hidden, generator=torch.Generator().manual_seed(1)).unbind()
    schedule = create_schedule(blocks(hidden, layers=LAYERS), mesh=mesh, example_inputs={"input": x})
    schedule.tensor_parallel()
    engine: Any = build(schedule, "torch", optimizer=matrices, loss_fn=nn.functional.mse_loss)
    engine.train_batch(input=x, labels=y)
    sharded = [each for each in engine.module.parameters() if each.dim() == 2 and shard_spec(each) is not None]
    sides: list[Step] = [engine.optimizer.step, by_hand(sharded), by_hand(sharded)]
    in_turns(sides, 1)
    return in_turns(sides, PAIRS)


def main() -> None:
    """Print the section."""
    print(f"\n## Optimizers: Muon's step at tp {RANKS}, {LAYERS} GPT blocks, gloo, fp32\n")
    print("| hidden size | all on every rank (ms) | one owner each (ms) | owner / every rank | by hand twice |")
    print("|---|---|---|---|---|")
    for hidden in HIDDEN:
        rounds = [slowest(in_new_processes(measure, RANKS, hidden)) for _ in range(ROUNDS)]
        mine, hand = (median(median(times[side]) for times in rounds) for side in (0, 1))
        beside, noise = (spread([ratio(times[side], times[1]) for times in rounds]) for side in (0, 2))
        print(f"| {hidden} | {hand * 1e3:.1f} | {mine * 1e3:.1f} | {beside} | {noise} |", flush=True)
    print("\nOnly the step of the optimizer is timed. Ratios are medians of rounds, with the lowest and the highest.")


if __name__ == "__main__":
    main()
