"""Tensor-parallel blocks against hand-written code and DTensor, on all visible GPUs of this machine.

Run ``make gpu``. The blocks are those of ``benchmarks/sharding.py``: forward and backward in each way, compiled and not, and
ours without the overlap of sums and weight gradients. With one device the group has one rank and nothing is sent: what shows
then is what sharded layers cost by themselves, and that they compile.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from benchmarks.sharding import Way, blocks, by_hand, compared, compiled, dtensor, ours

WAYS: dict[str, Way] = {
    "hand-written": by_hand,
    "slapo": ours,
    "slapo, sums not overlapped": partial(ours, overlapped=False),
    "DTensor": dtensor,
}
COMPILED = ("hand-written", "slapo", "DTensor")


class Sizes(NamedTuple):
    """Sizes of the blocks, their input and the measurement; ``heads`` must be divisible by the number of ranks."""

    hidden: int = 4096
    heads: int = 32
    layers: int = 2
    batch: int = 4
    sequence: int = 2048
    dtype: torch.dtype = torch.bfloat16
    warm_up: int = 5
    rounds: int = 30
    backend: str = "inductor"


class Measured(NamedTuple):
    """Median milliseconds of a way, and its ratio to the hand-written one as in ``benchmarks/sharding.py``."""

    milliseconds: float
    ratio: float
    spread: float


def measure(rank: int, device: str, sizes: Sizes) -> dict[str, Measured]:
    """Forward and backward in each way, in turns; the default process group is there.

    Raises:
        AssertionError: a way computes something else than the whole blocks do.
    """
    whole = blocks(sizes.hidden, sizes.heads, sizes.layers).to(device, sizes.dtype)
    x = torch.randn(sizes.batch, sizes.sequence, sizes.hidden, generator=torch.Generator().manual_seed(1))
    x = x.to(device, sizes.dtype)
    models = {name: way(copy.deepcopy(whole)) for name, way in WAYS.items()}
    models |= {f"{name}, compiled": compiled(WAYS[name](copy.deepcopy(whole)), sizes.backend) for name in COMPILED}
    expected = whole(x).detach()
    for name, model in models.items():
        for _ in range(sizes.warm_up):
            _step(model, x)
        _check(name, model(x).detach(), expected)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(sizes.rounds):
        for name, model in models.items():
            times[name].append(_milliseconds(partial(_step, model, x), device))
    base = times["hand-written"]
    return {name: Measured(statistics.median(own), *compared(own, base)) for name, own in times.items()}


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def _check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    apart = float((found.float() - expected.float()).norm() / expected.float().norm())
    limit = 1e-4 if expected.dtype == torch.float32 else 2e-2
    assert apart < limit, f"{name} differs from the whole blocks by {apart:.1e} of the output's norm"


def _milliseconds(step: Callable[[], None], device: str) -> float:
    """Return the seconds of one step, by GPU events or the CPU's clock; all ranks start together."""
    dist.barrier()
    if device != "cuda":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def report(found: dict[str, Measured], ranks: int, sizes: Sizes) -> str:
    """The table."""
    shape = f"{sizes.layers} blocks, hidden {sizes.hidden}, input {sizes.batch} x {sizes.sequence}, {sizes.dtype}"
    sent = "" if ranks > 1 else "; one rank, so nothing is sent and no sum can overlap"
    lines = [f"tensor parallelism over {ranks} device(s), {shape}{sent}", "", "| way | ms | / hand-written |", "|---|---|---|"]
    lines += [f"| {name} | {one.milliseconds:.2f} | {one.ratio:.3f} ± {one.spread:.3f} |" for name, one in found.items()]
    return "\n".join(lines)


def _worker(rank: int, ranks: int, sizes: Sizes) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29556", RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    found = measure(rank, "cuda", sizes)
    if rank == 0:
        print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, {report(found, ranks, sizes)}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Print the table of as many ranks as there are devices."""
    ranks, sizes = torch.cuda.device_count(), Sizes()
    if not ranks or sizes.heads % ranks:
        sys.exit(f"{ranks} devices are visible; make as many visible (CUDA_VISIBLE_DEVICES) as divide {sizes.heads} heads")
    spawn(_worker, (ranks, sizes), ranks)


if __name__ == "__main__":
    main()
