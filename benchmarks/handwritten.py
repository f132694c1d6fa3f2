"""Attention that people write by hand, split by ``tensor_parallel()``, against the same code written for two ranks.

Run ``python -m benchmarks.handwritten``; it prints a section for ``benchmarks/README.md``. Two gloo processes train the same
blocks in both ways, by turns in every round, each as often first as the other. The attention takes its sizes from whole values
(``B, T, C = x.shape`` and ``view(B, T, heads, C // heads)``), so ours runs from a graph with sizes of parts; the peer has these
sizes in its code and calls two autograd functions. A third way is code that needs no sizes of heads and is split alike: what is
between it and ours is the cost of the graph alone. A ratio is taken within each round; the table has the median.
"""

from __future__ import annotations

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
ROUNDS = {256: 90, 512: 30, 1024: 12}


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


class Sizeless(Attention):
    """The same with sizes that are those of a head, which parts have as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (each(x).view(B, T, -1, C // self.heads).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


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


def split(model: nn.Module, width: int) -> nn.Module:
    sch = create_schedule(model, example_inputs=(torch.zeros(2, 8, width),))
    sch.tensor_parallel()
    build(sch)
    return model


def models(width: int) -> list[nn.Module]:
    found = []
    for kind in (Attention, Sizeless, Attention):
        torch.manual_seed(0)
        found.append(nn.Sequential(*(kind(width) for _ in range(LAYERS))))
    ours, sizeless, whole = found
    return [split(ours, width), nn.Sequential(*map(Local, whole)), split(sizeless, width)]


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
    """Return the steps of all ways in each round, after a warm-up in which their outputs are compared."""
    torch.set_num_threads(1)
    x = torch.randn(BATCH, SEQUENCE, width, generator=torch.Generator().manual_seed(1))
    ways = models(width)
    for _ in range(3):
        for model in ways:
            step(model, x)
    torch.testing.assert_close(ways[0](x), ways[1](x), atol=1e-4, rtol=1e-4)
    found = []
    for number in range(rounds):
        taken = {index % 3: step(ways[index % 3], x) for index in range(number, number + 3)}
        found.append([taken[index] for index in range(3)])
    return found


def main() -> None:
    """Print the section."""
    print(f"## Attention written by hand: {LAYERS} layers, {HEADS} heads, [{BATCH}, {SEQUENCE}] tokens, tp=2, fp32\n")
    print("| width | written for 2 ranks (ms) | `tensor_parallel()` (ms) | ratio, median (quartiles) | to code without sizes |")
    print("|---|---|---|---|---|")
    for width, rounds in ROUNDS.items():
        ranks = run_distributed(times, 2, width, rounds, timeout=500)
        slowest = [[max(pair) for pair in zip(*both, strict=True)] for both in zip(*ranks, strict=True)]
        low, middle, high = statistics.quantiles([each[0] / each[1] for each in slowest], n=4)
        graph = statistics.median(each[0] / each[2] for each in slowest)
        ours, by_hand, _ = (1000 * statistics.median(each) for each in zip(*slowest, strict=True))
        ratio = f"**{middle:.3f}** ({low:.3f} to {high:.3f})"
        print(f"| {width} | {by_hand:.1f} | {ours:.1f} | {ratio} | {graph:.3f} |", flush=True)
    print()


if __name__ == "__main__":
    main()
