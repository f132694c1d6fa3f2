"""Attention that people write by hand, split by ``tensor_parallel()``, against the same code written for two ranks.

Run ``python -m benchmarks.handwritten``; it prints a section for ``benchmarks/README.md``, on a GPU with ``--device cuda``.
One process is rank 0 of two in torch's fake process group: it does all that a rank computes and waits for no message, so what
shows is the cost of the code. The attention takes its sizes from whole values (``B, T, C = x.shape`` and ``view(B, T, heads,
C // heads)``), so ours runs from a graph with sizes of parts; the peer has these sizes in its code and calls two autograd
functions. A third way is code that needs no sizes of heads and is split alike: what is between it and ours is the cost of the
graph alone. All ways take a step in every round, each as often first as the others, and a ratio is taken within each round;
the table has medians. On a CPU time is that of the process, which others on the machine do not add to.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.sharding import Column, Row, _Copy
from slapo_core import build, create_schedule

LAYERS, HEADS = 4, 8


class Sizes(NamedTuple):
    """Size of the input, and the number of rounds at each width."""

    device: str
    dtype: torch.dtype
    batch: int
    sequence: int
    rounds: dict[int, int]


SIZES = {
    "cpu": Sizes("cpu", torch.float32, 4, 128, {256: 300, 512: 100, 1024: 40, 2048: 12}),
    "cuda": Sizes("cuda", torch.bfloat16, 8, 2048, {1024: 60, 2048: 60, 4096: 40}),
}


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
    """Run a forward and a backward; return its seconds."""
    clock = time.perf_counter if x.is_cuda else time.process_time
    start = clock()
    model(x).square().mean().backward()
    if x.is_cuda:
        torch.cuda.synchronize()
    taken = clock() - start
    model.zero_grad()
    return taken


def times(width: int, rounds: int, sizes: Sizes) -> list[list[float]]:
    """Return the steps of all ways in each round, after a warm-up in which their outputs and gradients are compared."""
    x = torch.randn(sizes.batch, sizes.sequence, width, generator=torch.Generator().manual_seed(1))
    ways = models(width)
    outputs, gradients = [], []
    for model in ways:
        outputs.append(model(x))
        outputs[-1].square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)
    x = x.to(sizes.device, sizes.dtype)
    ways = [model.to(sizes.device, sizes.dtype) for model in ways]
    for model in ways * 3:
        step(model, x)
    found = []
    for number in range(rounds):
        taken = {index % 3: step(ways[index % 3], x) for index in range(number, number + 3)}
        found.append([taken[index] for index in range(3)])
    return found


def table(sizes: Sizes) -> list[str]:
    """Return the rows of the section; there may be no process group."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    rows = [
        f"## Attention written by hand: {LAYERS} layers, {HEADS} heads, [{sizes.batch}, {sizes.sequence}] tokens, rank 0 of 2, "
        f"{str(sizes.dtype).removeprefix('torch.')}, {sizes.device}\n",
        "| width | written for 2 ranks (ms) | `tensor_parallel()` (ms) | ratio, median (quartiles) | to code without sizes |",
        "|---|---|---|---|---|",
    ]
    for width, rounds in sizes.rounds.items():
        found = times(width, rounds, sizes)
        low, middle, high = statistics.quantiles([each[0] / each[1] for each in found], n=4)
        graph = statistics.median(each[0] / each[2] for each in found)
        ours, by_hand, _ = (1000 * statistics.median(each) for each in zip(*found, strict=True))
        rows.append(f"| {width} | {by_hand:.1f} | {ours:.1f} | **{middle:.3f}** ({low:.3f} to {high:.3f}) | {graph:.3f} |")
    dist.destroy_process_group()
    return rows


def main() -> None:
    """Print the section."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=SIZES, default="cpu")
    torch.set_num_threads(1)
    print("\n".join(table(SIZES[parser.parse_args().device])) + "\n")


if __name__ == "__main__":
    main()
