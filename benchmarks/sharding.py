"""Tensor parallelism against hand-written code and DTensor: step time and memory.

Run ``python -m benchmarks.sharding``; it prints a section for ``benchmarks/README.md``. Two gloo processes on this machine
train the same blocks in three ways, one after the other in every round, each as often first as the others: ours, Megatron's
two autograd functions written by hand, and torch's ``parallelize_module`` (DTensor).

What else the machine does lasts longer than a round and so meets all ways of one alike. A ratio is therefore taken within each
round, against the hand-written step of that round, and the table has the median over the rounds; after ``±`` is half of the
interval that holds the true median in 95 of 100 runs, if rounds do not depend on each other. Small sizes, whose steps are
short, get more rounds.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from slapo_core import build, create_schedule
from slapo_testing import run_distributed

LAYERS, HEADS, BATCH, SEQUENCE = 4, 8, 4, 128
ROUNDS = {256: 240, 512: 90, 1024: 30}


class Block(nn.Module):
    """A GPT block; ``qkv`` makes the query, key and value of one head after the other, so a plain split deals out heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head = hidden // heads
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.qkv(self.first(x))
        q, k, v = made.view(*made.shape[:2], -1, 3 * self.head).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


def blocks(hidden: int, heads: int = HEADS, layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(hidden, heads) for _ in range(layers)))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Column(nn.Module):
    """Hand-written column-parallel layer."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.weight, self.bias = (nn.Parameter(t.detach().chunk(size)[rank].clone()) for t in (whole.weight, whole.bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(_Copy.apply(x), self.weight, self.bias)


class Row(nn.Module):
    """Hand-written row-parallel layer."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Reduce.apply(F.linear(x, self.weight)) + self.bias


def by_hand(model: nn.Module) -> nn.Module:
    for block in model.children():
        for name in ("qkv", "up"):
            setattr(block, name, Column(getattr(block, name)))
        for name in ("proj", "down"):
            setattr(block, name, Row(getattr(block, name)))
    return model


def ours(model: nn.Module, *, overlapped: bool = True) -> nn.Module:
    schedule = create_schedule(model)
    for block in schedule.select("*"):
        for name in ("qkv", "up"):
            block[name].shard("weight", axis=0, blocks=1).sync("bwd_post", "all_reduce")
            if not overlapped:
                vars(block[name].mod).pop("forward", None)  # torch's own has one backward for input and weight
        for name in ("proj", "down"):
            block[name].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    return build(schedule).module


def dtensor(model: nn.Module) -> nn.Module:
    plan = {"*.qkv": ColwiseParallel(), "*.up": ColwiseParallel(), "*.proj": RowwiseParallel(), "*.down": RowwiseParallel()}
    device = next(model.parameters()).device.type
    return parallelize_module(model, init_device_mesh(device, (dist.get_world_size(),)), plan)


def compiled(model: nn.Module, backend: str = "inductor") -> nn.Module:
    for block in model.children():
        block.compile(fullgraph=True, backend=backend)
    return model


Way = Callable[[nn.Module], nn.Module]
WAYS: dict[str, Way] = {"slapo": ours, "hand-written": by_hand, "DTensor": dtensor}
VARIANTS: dict[str, Way] = {
    "hand-written": by_hand,
    "slapo": ours,
    "slapo, sums not overlapped": partial(ours, overlapped=False),
    "slapo, blocks compiled": lambda model: compiled(ours(model)),
    "hand-written, blocks compiled": lambda model: compiled(by_hand(model)),
}


def _step(model: nn.Module, x: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    model(x).square().mean().backward()
    getattr(model, "finish", lambda: None)()
    return time.perf_counter() - start


def _saved(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that a forward keeps for its backward, weights apart; each storage once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model(x)
    total = sum(seen.values())
    del kept
    return total


def memory(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes on this rank after a training step with AdamW, and what the next forward keeps; each storage counts once."""
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, x)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    weights = [*model.parameters(), *model.buffers()]
    tensors = [*weights, *(weight.grad for weight in weights if weight.grad is not None), *states]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values()) + _saved(model, x)


class Measured(NamedTuple):
    """Result of one way: median seconds of a step, the ratio to the hand-written one, its quartiles, and bytes."""

    seconds: float
    ratio: float
    spread: float
    bytes: int
    kept: int

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ± {self.spread:.3f}"


def compared(times: list[float], base: list[float]) -> tuple[float, float]:
    """Median ratio of rounds, and half of its interval, whose ends are found by the signs of the rounds alone."""
    ratios = sorted(time / other for time, other in zip(times, base, strict=True))
    middle, reach = len(ratios) / 2, 0.98 * len(ratios) ** 0.5
    low, high = ratios[max(0, math.floor(middle - reach))], ratios[min(len(ratios) - 1, math.ceil(middle + reach))]
    return statistics.median(ratios), (high - low) / 2


def measure_steps(rank: int, hidden: int, ways: str) -> dict[str, Measured]:
    """Forward and backward in each way, and memory of this rank; ``ways`` is where they are listed."""
    torch.set_num_threads(1)
    whole = blocks(hidden)
    models = {name: way(copy.deepcopy(whole)) for name, way in resolve_name(ways).items()}
    x = torch.randn(BATCH, SEQUENCE, hidden, generator=torch.Generator().manual_seed(1))
    expected = whole(x)
    times: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        for _ in range(3):  # the first run after build is looked at, the second may compile
            torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-4)
            _step(model, x)
    names = list(models)
    for turn in range(ROUNDS[hidden]):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(_step(models[name], x))
    return {name: _measured(name, models[name], times, x) for name in names}


def _measured(name: str, model: nn.Module, times: dict[str, list[float]], x: torch.Tensor) -> Measured:
    plain = "DTensor" not in name  # the storages of the others are not where these functions look
    sizes = (memory(model, x), _saved(model, x)) if plain else (0, 0)
    return Measured(statistics.median(times[name]), *compared(times[name], times["hand-written"]), *sizes)


def report_steps() -> None:
    """The table of the three ways."""
    print("\n## Tensor parallelism: 2 gloo ranks, 4 GPT blocks, forward and backward\n")
    print("| hidden | hand-written (ms) | slapo (ms) | slapo / hand-written | DTensor / hand-written", end="")
    print(" | memory by hand (MB) | slapo / by hand |\n|---|---|---|---|---|---|---|")
    for hidden in ROUNDS:
        mine, hand, dtensor = run_distributed(measure_steps, 2, hidden, "benchmarks.sharding:WAYS", timeout=600)[0].values()
        print(
            f"| {hidden} | {hand.seconds * 1e3:.1f} | {mine.seconds * 1e3:.1f} | {mine} | {dtensor} "
            f"| {hand.bytes / 1e6:.1f} | {mine.bytes / hand.bytes:.3f} |",
            flush=True,
        )
    print(
        "\nMemory of a rank, as measured after a step with AdamW: parameters, gradients, the optimizer's state and what a",
        end="",
    )
    print(" forward keeps for its backward.")


def report_variants(ways: str) -> None:
    """The table of other ways to run the blocks, of hidden size 512."""
    found = run_distributed(measure_steps, 2, 512, ways, timeout=600)[0]
    hand = found["hand-written"]
    print("\n| hidden 512 | ms | / hand-written | kept by a forward / by hand |\n|---|---|---|---|")
    for name, one in found.items():
        print(f"| {name} | {one.seconds * 1e3:.1f} | {one} | {one.kept / hand.kept:.3f} |", flush=True)


def main() -> None:
    """Print the sections."""
    report_steps()
    report_variants("benchmarks.sharding:VARIANTS")


if __name__ == "__main__":
    main()
