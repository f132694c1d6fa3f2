"""Attention that people write by hand, split by ``tensor_parallel()``, against the same code written for two ranks.

Run ``python -m benchmarks.handwritten``; it prints a section for ``benchmarks/README.md``. Two gloo processes train the same
blocks in both ways, by turns in every round, each as often first as the other. The attention takes its sizes from whole values
(``B, T, C = x.shape`` and ``view(B, T, heads, C // heads)``), so ours runs from a graph with sizes of parts; the peer has these
sizes in its code and calls two autograd functions. A ratio is taken within each round; the table has the median.
"""

from __future__ import annotations

import os
import platform
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.sharding import Column, Row, _Copy
from slapo_core import build, create_schedule
from slapo_core.testing import run_distributed

LAYERS, HEADS, BATCH, SEQUENCE = 4, 8, 4, 128
ROUNDS = {256: 60, 512: 30, 1024: 12}


class Attention(nn.Module):
    """Causal attention with one projection for each of q, k and v, as of a tutorial."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.heads = HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (each(x).view(B, T, self.heads, C // self.heads).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).reshape(B, T, C))


class Local(nn.Module):
    """The same for one rank of several; q, k and v share the sum of their input's gradient."""

    def __init__(self, whole: Attention) -> None:
        super().__init__()
        self.q, self.k, self.v = Column(whole.q), Column(whole.k), Column(whole.v)
        self.o, self.heads = Row(whole.o), HEADS // dist.get_world_size()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        size, shared = C // HEADS, _Copy.apply(x)
        layers = (self.q, self.k, self.v)
        q, k, v = (F.linear(shared, e.weight, e.bias).view(B, T, self.heads, size).transpose(1, 2) for e in layers)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).reshape(B, T, self.heads * size))


def models(width: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    ours = nn.Sequential(*(Attention(width) for _ in range(LAYERS)))
    by_hand = nn.Sequential(*(Local(block) for block in ours))
    sch = create_schedule(ours, example_inputs=(torch.zeros(2, 8, width),))
    sch.tensor_parallel()
    build(sch)
    return ours, by_hand


def step(model: nn.Module, x: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    loss = model(x).square().mean()
    loss.backward()
    taken = time.perf_counter() - start
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.01)
            parameter.grad = None
    return taken


def times(rank: int, width: int, rounds: int) -> list[list[float]]:
    """Return the steps of both ways in each round, after a warm-up in which their outputs are compared."""
    torch.set_num_threads(1)
    x = torch.randn(BATCH, SEQUENCE, width, generator=torch.Generator().manual_seed(1))
    ways = models(width)
    for _ in range(3):
        for model in ways:
            step(model, x)
    torch.testing.assert_close(ways[0](x), ways[1](x), atol=1e-4, rtol=1e-4)
    found = []
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        taken = {index: step(ways[index], x) for index in order}
        found.append([taken[0], taken[1]])
    return found


def main() -> None:
    """Print the section."""
    print(f"## Attention written by hand: {LAYERS} layers, {HEADS} heads, [{BATCH}, {SEQUENCE}] tokens, tp=2, fp32\n")
    print("| width | written for 2 ranks (ms) | `tensor_parallel()` (ms) | ratio, median (quartiles) |")
    print("|---|---|---|---|")
    for width, rounds in ROUNDS.items():
        slowest = [
            [max(pair) for pair in zip(*each, strict=True)]
            for each in zip(*run_distributed(times, 2, width, rounds, timeout=500), strict=True)
        ]
        ratios = [ours / by_hand for ours, by_hand in slowest]
        low, middle, high = statistics.quantiles(ratios, n=4)
        ours, by_hand = (1000 * statistics.median(each) for each in zip(*slowest, strict=True))
        print(f"| {width} | {by_hand:.1f} | {ours:.1f} | **{middle:.3f}** ({low:.3f} to {high:.3f}) |", flush=True)
    print(f"\n{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}\n")


if __name__ == "__main__":
    main()
