"""Fused chains against eager ones, and layers compiled one by one against a model compiled as a whole.

Run ``python -m benchmarks.fusion``; it prints a section for ``benchmarks/README.md``. Each figure is of a new process without
torch's caches on disk. The peer is ``torch.compile`` itself, of the same functions and of the same unmodified model.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.peers.rounds import in_new_processes, spread
from benchmarks.sharding import Block
from slapo_core import create_schedule

ROWS, TOKENS, HIDDEN = 8, 256, 768
"""Of the chains."""
LAYERS, WIDTH, HEADS, SEQUENCE = 24, 256, 8, 128
"""Of the model, which gets two rows."""
ROUNDS = 3


class BiasGelu(nn.Module):
    """What follows the first product of an MLP whose bias is apart."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + self.bias)


class DropoutResidualNorm(nn.Module):
    """What follows a sub-layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(residual + F.dropout(x, 0.1, True), (HIDDEN,), self.weight, self.bias)


def _bias_gelu(x: Any, bias: Any) -> Any:
    return F.gelu(x + bias)


def _dropout_residual_norm(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(residual + F.dropout(x, 0.1, True), (HIDDEN,), weight, bias)


CHAINS: dict[str, tuple[type[nn.Module], Callable[..., Any], str]] = {
    "bias + GELU": (BiasGelu, _bias_gelu, "inductor"),
    "dropout + residual + norm": (DropoutResidualNorm, _dropout_residual_norm, "inductor"),
    'the same, `compiler="inductor_fast_dropout"`': (DropoutResidualNorm, _dropout_residual_norm, "inductor_fast_dropout"),
}


def chains(rank: int, name: str) -> list[float]:
    """Milliseconds of a forward and a backward: eager, ``fuse``, and ``torch.compile`` of the module, steps in turns."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    cls, pattern, compiler = CHAINS[name]
    inputs = [torch.randn(ROWS, TOKENS, HIDDEN, requires_grad=True) for _ in range(2)]
    schedule = create_schedule(cls(), example_inputs=tuple(inputs)).trace()
    schedule.fuse(schedule.find(pattern), compiler=compiler)
    sides: list[Callable[..., Any]] = [cls(), schedule.mod, torch.compile(cls())]
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(33):
        for side, module in enumerate(sides):
            start = time.perf_counter()
            module(*inputs).sum().backward()
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


class Compiled(NamedTuple):
    """Of a model: seconds of its first step, which compiles it, and milliseconds of one after that."""

    first: float
    step: float


def compiled(rank: int, whole: bool) -> Compiled:
    """Compile the model as a whole, or layer by layer."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    torch.compile(_warm)(torch.ones(64)).sum()  # once per machine: the compiler's header, what the processor can do
    model: Any = Stack()
    if whole:
        model = torch.compile(model)
    else:
        create_schedule(model)["layers"].compile()
    x = torch.randn(2, SEQUENCE, WIDTH)
    times = []
    for _ in range(16):
        start = time.perf_counter()
        model(x).sum().backward()
        times.append(time.perf_counter() - start)
    return Compiled(times[0], median(times[3:]) * 1e3)


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
    pairs = [[in_new_processes(compiled, 1, whole)[0] for whole in (True, False)] for _ in range(rounds)]
    for what, unit, digits in (("first", "s", 1), ("step", "ms", 1)):
        whole, layers = (median(getattr(pair[side], what) for pair in pairs) for side in (0, 1))
        ratios_of = spread([getattr(pair[1], what) / getattr(pair[0], what) for pair in pairs])
        name = "first step, compiling" if what == "first" else "a step after it"
        print(f"| {name} ({unit}) | {whole:.{digits}f} | {layers:.{digits}f} | {ratios_of} |", flush=True)


if __name__ == "__main__":
    main()
