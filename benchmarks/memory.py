"""Memory and time of each checkpoint policy, beside the unmodified model and torch's own checkpoint.

Run ``python -m benchmarks.memory``; it prints a section for ``benchmarks/README.md``. Each way runs in a process of its own;
memory is what the process holds behind a forward more than before it, freed memory given back.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.peers.rounds import in_new_processes
from benchmarks.sharding import Block
from slapo_core import create_schedule

LAYERS, WIDTH, HEADS, ROWS, TOKENS = 12, 512, 8, 4, 512


class Stack(nn.Module):
    """So many blocks; ``call`` runs one."""

    def __init__(self, layers: int = LAYERS, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(WIDTH, HEADS) for _ in range(layers))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if self.call is None else self.call(layer, x)
        return x


WAYS: dict[str, dict[str, Any]] = {
    "unmodified": {},
    "torch.utils.checkpoint, every layer": {},
    "`checkpoint()`": {"checkpoint": {}},
    "`checkpoint(ratio=0.5)`": {"checkpoint": {"ratio": 0.5}},
    '`checkpoint(policy="matmuls")`': {"checkpoint": {"policy": "matmuls"}},
    '`checkpoint(policy="matmuls", ratio=0.5)`': {"checkpoint": {"policy": "matmuls", "ratio": 0.5}},
    '`checkpoint(budget="16MiB")`': {"checkpoint": {"budget": "16MiB"}},
    '`checkpoint(budget="32MiB")`': {"checkpoint": {"budget": "32MiB"}},
    '`checkpoint(budget="64MiB")`': {"checkpoint": {"budget": "64MiB"}},
    "`offload()`": {"offload": {}},
    "`checkpoint()` and `offload()`": {"checkpoint": {}, "offload": {}},
}
"""Calls on the schedule of the list of layers."""


class Found(NamedTuple):
    """MiB kept by a forward, and seconds of the processor for a step: others may use the machine, too."""

    kept: float
    step: float


def measure(rank: int, way: str, steps: int) -> Found:
    """One way, in this process."""
    torch.set_num_threads(1)
    by_torch = partial(checkpoint, use_reentrant=False) if way.startswith("torch") else None
    model, x = Stack(call=by_torch), torch.randn(ROWS, TOKENS, WIDTH)
    layers = create_schedule(model, example_inputs=(x,))["layers"]
    for primitive, options in WAYS[way].items():
        layers.apply(primitive, **options)
    kept, times = [], []
    for _ in range(steps + 1):
        model.zero_grad(set_to_none=False)
        before = _held()
        start = time.process_time()
        loss = model(x).sum()
        forward = time.process_time() - start
        kept.append(_held() - before)
        start = time.process_time()
        loss.backward()
        times.append(forward + time.process_time() - start)
        del loss
    return Found(median(kept[1:]), median(times[1:]))


def _held() -> float:
    """MiB of memory that this process holds."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Print the section; with ``--small`` one step of each."""
    steps = 1 if "--small" in sys.argv[1:] else 3
    print(f"\n## Memory: {LAYERS} GPT blocks, hidden size {WIDTH}, {ROWS} x {TOKENS} tokens in fp32, checkpointed\n")
    print("| | kept by a forward (MiB) | of the unmodified | a step (s of the processor) | of the unmodified |")
    print("|---|---|---|---|---|")
    base: Found | None = None
    for way in WAYS:
        found: Found = in_new_processes(measure, 1, way, steps)[0]
        base = base or found
        shares = found.kept / base.kept, found.step / base.step
        print(f"| {way} | {found.kept:.0f} | {shares[0]:.2f} | {found.step:.2f} | {shares[1]:.2f} |", flush=True)
    print(
        f"\nA budget is of each of the {LAYERS} layers. On a CPU, what is offloaded is a copy in the same memory, which costs"
    )
    print("the copying; on a GPU it is pinned memory of the CPU.")


if __name__ == "__main__":
    main()
