"""Fused chains against eager ones, and layers compiled one by one against a model compiled as a whole.

Run ``python -m benchmarks.fusion``; it prints a section for ``benchmarks/README.md``. Each figure is of a new process without
torch's caches on disk. The peer is ``torch.compile`` itself, of the same functions and of the same unmodified model.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.peers.rounds import in_new_processes, spread
from benchmarks.sharding import Block
from slapo_core import create_schedule

ROWS, TOKENS, HIDDEN = 8, 256, 768
"""Sizes of the chains."""
LAYERS, WIDTH, HEADS, SEQUENCE = 24, 256, 8, 128
"""Sizes of the model, which gets a batch of two rows."""
ROUNDS = 3


class BiasGelu(nn.Module):
    """Operations after the first product of an MLP with a separate bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + self.bias)


class BiasNewGelu(BiasGelu):
    """The same with GELU as GPT-2 writes it."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return _bias_new_gelu(x, self.bias)


class DropoutResidualNorm(nn.Module):
    """Operations after a sub-layer: dropout, residual sum, norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(residual + F.dropout(x, 0.1, True), (HIDDEN,), self.weight, self.bias)


def _bias_gelu(x: Any, bias: Any) -> Any:
    return F.gelu(x + bias)


def _bias_new_gelu(x: Any, bias: Any) -> Any:
    y = x + bias
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))


def _dropout_residual_norm(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(residual + F.dropout(x, 0.1, True), (HIDDEN,), weight, bias)


CHAINS: dict[str, tuple[type[nn.Module], Callable[..., Any], str]] = {
    "bias + GELU": (BiasGelu, _bias_gelu, "inductor"),
    "bias + GELU as GPT-2 writes it, by tanh": (BiasNewGelu, _bias_new_gelu, "inductor"),
    "dropout + residual + norm": (DropoutResidualNorm, _dropout_residual_norm, "inductor"),
    'the same, `compiler="inductor_fast_dropout"`': (DropoutResidualNorm, _dropout_residual_norm, "inductor_fast_dropout"),
}


def chains(rank: int, name: str) -> list[float]:
    """Milliseconds of a forward and a backward: eager, ``fuse``, and ``torch.compile`` of the module, steps in turns.

    The gradient that comes in is dense, as in a model, and what comes out is added to nothing: only the chain is timed.
    """
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    cls, pattern, compiler = CHAINS[name]
    inputs = [torch.randn(ROWS, TOKENS, HIDDEN, requires_grad=True) for _ in range(2)]
    schedule = create_schedule(cls(), example_inputs=tuple(inputs)).trace()
    schedule.fuse(schedule.find(pattern), compiler=compiler)
    sides: list[Any] = [cls(), schedule.mod, torch.compile(cls())]
    times: list[list[float]] = [[] for _ in sides]
    gradient = torch.randn(ROWS, TOKENS, HIDDEN)
    for turn in range(33):
        for side, module in enumerate(sides):
            start = time.perf_counter()
            torch.autograd.grad(module(*inputs), [inputs[0], *module.parameters()], gradient)
            if turn > 2:
                times[side].append((time.perf_counter() - start) * 1e3)
    return [median(of) for of in times]


class Stack(nn.Module):
    """So many blocks, each another module of one class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(WIDTH, HEADS) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def _warm(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def _made(whole: bool) -> Any:
    """The model, compiled as a whole or layer by layer, when it runs."""
    model = Stack()
    if whole:
        return torch.compile(model)
    create_schedule(model)["layers"].compile()
    return model


def _seconds(model: Callable[..., Any], x: torch.Tensor) -> float:
    start = time.perf_counter()
    model(x).sum().backward()
    return time.perf_counter() - start


def compiling(rank: int, whole: bool) -> float:
    """Seconds of a first step."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    torch.compile(_warm)(torch.ones(64)).sum()  # once per machine: the compiler's header, what the processor can do
    return _seconds(_made(whole), torch.randn(2, SEQUENCE, WIDTH))


def steps(rank: int) -> list[float]:
    """Milliseconds of a step after that, of the whole and layer by layer, in turns."""
    torch.set_num_threads(1)
    x = torch.randn(2, SEQUENCE, WIDTH)
    sides = [_made(whole) for whole in (True, False)]
    turns = [[_seconds(side, x) * 1e3 for side in sides] for _ in range(24)]
    return [median(turn[side] for turn in turns[3:]) for side in (0, 1)]


def main() -> None:
    """Print the section; with ``--small`` one round of the chains, to see whether all runs."""
    rounds = 1 if "--small" in sys.argv[1:] else ROUNDS
    print(f"\n## Fusion: chains of element-wise work on {ROWS} x {TOKENS} x {HIDDEN} fp32 numbers, forward and backward\n")
    print("| chain | eager (ms) | fuse (ms) | eager / fuse | torch.compile / fuse |\n|---|---|---|---|---|")
    for name in CHAINS:
        found = [in_new_processes(chains, 1, name)[0] for _ in range(rounds)]
        eager, fused = (median(one[side] for one in found) for side in (0, 1))
        ratios = [spread([one[side] / one[1] for one in found]) for side in (0, 2)]
        print(f"| {name} | {eager:.2f} | {fused:.2f} | {ratios[0]} | {ratios[1]} |", flush=True)
    if rounds == 1:
        return
    print(f"\nA model of {LAYERS} GPT blocks, hidden size {WIDTH}, 2 x {SEQUENCE} tokens, by `torch.compile` of torch:\n")
    print('| | as a whole | each layer, `sch["layers"].compile()` | layers / whole |\n|---|---|---|---|')
    first = [[in_new_processes(compiling, 1, whole)[0] for whole in (True, False)] for _ in range(rounds)]
    later = [in_new_processes(steps, 1)[0] for _ in range(rounds)]
    for what, pairs in (("first step, compiling (s)", first), ("a step after it, in turns (ms)", later)):
        whole, layers = (median(pair[side] for pair in pairs) for side in (0, 1))
        ratios_of = spread([pair[1] / pair[0] for pair in pairs])
        print(f"| {what} | {whole:.1f} | {layers:.1f} | {ratios_of} |", flush=True)


if __name__ == "__main__":
    main()
