"""Steps of optimizers at tp 2: Muon's on owners against all ranks, those of LAMB and LARS on shards against owners.

Run ``python -m benchmarks.optimizers``; it prints a section for ``benchmarks/README.md``. The matrices are those of GPT blocks,
sharded over two gloo ranks. By hand each rank gathers values and gradients of all matrices, steps ``torch.optim.Muon`` on the
whole ones, and keeps its parts: the shortest script that is right. Only the optimizer's step is timed, on gradients that stay
the same. A step of one side is followed by one of the other; the ratio of a round is the median of such pairs, of the slowest
rank. LAMB and LARS, written as for one process, step eight square matrices of a size, in place as shards or gathered to owners.
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
from slapo_core import ShardSpec, build, create_schedule, shard_spec
from slapo_training.optimizers import whole_tensor_construction

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


class Lars(torch.optim.Optimizer):
    """LARS, with LAMB's direction if asked for."""

    def __init__(self, parameters: Any, lr: float = 1e-3, is_lamb: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "is_lamb": is_lamb})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, update = self.state[p], p.grad
                if group["is_lamb"]:
                    if not state:
                        state.update(mean=torch.zeros_like(p), square=torch.zeros_like(p))
                    state["mean"].lerp_(p.grad, 0.1)
                    state["square"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                    update = state["mean"] / (state["square"].sqrt() + 1e-6)
                p.sub_(update * (group["lr"] * p.norm() / (update.norm() + 1e-8)))


IN_PLACE = {"LAMB": partial(Lars, is_lamb=True), "LARS": Lars}
SIZES = (128, 256, 384, 512, 768, 1024, 1536)


def measure_in_place(rank: int, name: str, hidden: int) -> list[list[float]]:
    """Seconds of steps of shards in place, and on owners, on this rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 1, RANKS), mesh_dim_names=("pp", "dp", "tp"))
    sides: list[Step] = []
    for whole_tensor_construction.MIN_SHARDED_NUMEL in (0, 2**62):  # type: ignore[misc]
        x, y = torch.randn(2, 1, 4, hidden, generator=torch.Generator().manual_seed(1)).unbind()
        layers = (nn.Linear(hidden, hidden, bias=False) for _ in range(2 * LAYERS))
        model = nn.Sequential(*(each for layer in layers for each in (layer, nn.GELU())))
        schedule = create_schedule(model, mesh=mesh, example_inputs={"input": x})
        schedule.tensor_parallel()
        engine: Any = build(schedule, "torch", optimizer=IN_PLACE[name], loss_fn=nn.functional.mse_loss)
        engine.train_batch(input=x, labels=y)
        assert len(engine.optimizer.named_stand_ins()) == 2 * LAYERS
        assert [each.is_in_place for each in engine.optimizer.stand_ins] == [whole_tensor_construction.MIN_SHARDED_NUMEL == 0]
        sides.append(engine.optimizer.step)
    in_turns(sides, 2)
    return in_turns(sides, 3 * PAIRS)


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
    print("\n| optimizer | elements of a matrix | owners (ms) | shards in place (ms) | in place / owners |")
    print("|---|---|---|---|---|")
    for name in IN_PLACE:
        for hidden in SIZES:
            rounds = [slowest(in_new_processes(measure_in_place, RANKS, name, hidden)) for _ in range(ROUNDS)]
            own, owners = (median(median(times[side]) for times in rounds) for side in (0, 1))
            beside = spread([ratio(*times) for times in rounds])
            print(f"| {name} | {hidden**2:,} | {owners * 1e3:.1f} | {own * 1e3:.1f} | {beside} |", flush=True)


if __name__ == "__main__":
    main()
