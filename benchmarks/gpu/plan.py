"""Estimates of memory and step time against real steps of GPT-2 124M, on one GPU or on all that ``torchrun`` starts.

Run ``make gpu``, or ``python -m benchmarks.gpu.plan``; for several GPUs ``torchrun --nproc-per-node 2 -m benchmarks.gpu.plan``.
The machine is calibrated first. With ``--cpu`` a tiny model runs on CPUs, to see that all of it runs: memory is compared, and
step time is shown.

Memory is ``torch.cuda.max_memory_allocated`` of a later step, which has cuBLAS's workspaces and the allocator's rounding beside
the tensors that an estimate counts. An estimate takes its rank's tensors and seconds from runs on fake tensors.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpu.engines import TINY
from benchmarks.gpu.timing import Sizes, batch_of, gpt2, milliseconds
from slapo_core import Schedule, build, create_schedule
from slapo_plan import Estimate, Hardware, calibrate, estimate, fake_ranks, measure_step

MEMORY_LIMIT, TIME_LIMIT = 0.05, 0.15
"""Shares by which an estimate may miss a measurement."""

adamw = partial(torch.optim.AdamW, lr=1e-4)


class Case(NamedTuple):
    """One layout and its options of ``build``."""

    name: str
    pp: int = 1
    dp: int = 1
    tp: int = 1
    microbatches: int = 1
    checkpoints: bool = False
    precision: str = "bf16"
    data_parallel: str = "ddp"


class Measured(NamedTuple):
    """One case on real devices: bytes at the peak of the fullest rank of each pipeline stage, and milliseconds of a step."""

    peaks: list[int]
    milliseconds: float


def cases(ranks: int) -> list[Case]:
    """Return the layouts of so many ranks."""
    if ranks == 1:
        return [
            Case("bf16"),
            Case("bf16, 4 micro-batches", microbatches=4),
            Case("bf16, recomputed", checkpoints=True),
            Case("fp32", precision="fp32"),
        ]
    return [
        Case("ddp", dp=ranks),
        Case("fsdp", dp=ranks, data_parallel="fsdp"),
        Case("tp", tp=ranks),
        Case("1f1b", pp=ranks, microbatches=2 * ranks),
        Case("1f1b, recomputed", pp=ranks, microbatches=2 * ranks, checkpoints=True),
    ]


def estimated(case: Case, sizes: Sizes, hardware: Hardware, ranks: int) -> Estimate:
    """Return the estimate of a case, made in this process alone."""
    found, batch = sizes._replace(device="meta"), _batch(case, sizes._replace(device="cpu"))
    if ranks == 1:
        return estimate(_scheduled(case, found, None, batch), batch, hardware=hardware, **_options(case))
    with fake_ranks(pp=case.pp, dp=case.dp, tp=case.tp, device_type=sizes.device) as mesh:
        return estimate(_scheduled(case, found, mesh, batch), batch, hardware=hardware, **_options(case))


def measured(case: Case, sizes: Sizes, ranks: int) -> Measured:
    """Return what steps of a case take on real devices; with several ranks, all call this."""
    shape = (case.pp, case.dp, case.tp)
    mesh = init_device_mesh(sizes.device, shape, mesh_dim_names=("pp", "dp", "tp")) if ranks > 1 else None
    batch = _batch(case, sizes)
    engine: Any = build(_scheduled(case, sizes, mesh, batch), "torch", check=False, **_options(case))
    step = partial(engine.train_batch, **batch)
    for _ in range(max(2, sizes.warm_up)):
        step()
    peak = min(_peak(step, sizes) for _ in range(3))
    lasts = median(milliseconds(step, sizes) for _ in range(sizes.rounds))
    engine.close()
    found: list[tuple[int, float]] = [(peak, lasts)]
    if ranks > 1:
        found = [(0, 0.0)] * ranks
        dist.all_gather_object(found, (peak, lasts))
    per_stage = ranks // case.pp
    peaks = [max(peak for peak, _ in found[first : first + per_stage]) for first in range(0, ranks, per_stage)]
    return Measured(peaks, max(lasts for _, lasts in found))


def _peak(step: Any, sizes: Sizes) -> int:
    if sizes.device != "cuda":
        return measure_step(step).peak
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _scheduled(case: Case, sizes: Sizes, mesh: Any, batch: dict[str, Any]) -> Schedule:
    rows = sizes.batch // case.microbatches
    sch = create_schedule(gpt2(sizes), mesh=mesh, example_inputs={name: each[:rows] for name, each in batch.items()})
    if case.tp > 1:
        sch.tensor_parallel()
    for block in sch.select("transformer.h.*") if case.checkpoints else ():
        block.checkpoint()
    if case.pp > 1:
        sch.pipeline(case.pp)
    return sch


def _batch(case: Case, sizes: Sizes) -> dict[str, Any]:
    torch.manual_seed(0)
    rows = max(sizes.batch, case.microbatches)
    return batch_of(sizes._replace(batch=rows - rows % case.microbatches))


def _options(case: Case) -> dict[str, Any]:
    precision = {} if case.precision == "fp32" else {"precision": case.precision}
    return {"microbatches": case.microbatches, "data_parallel": case.data_parallel, "optimizer": adamw, **precision}


def row(case: Case, guess: Estimate, found: Measured) -> tuple[str, float, float]:
    """Return the row of a table, and the shares by which memory, of the worst stage, and time are missed."""
    peaks = [each.memory.peak for each in guess.ranks]
    misses = [(own / real - 1, own, real) for own, real in zip(peaks, found.peaks, strict=True)]
    memory, own, real = max(misses, key=lambda each: abs(each[0]))
    expected = 1e3 * (guess.step_seconds or 0.0)
    lasts = expected / found.milliseconds - 1
    sizes = f"{own / 2**20:.1f} | {real / 2**20:.1f} | {memory:+.1%}"
    return f"| {case.name} | {sizes} | {expected:.1f} | {found.milliseconds:.1f} | {lasts:+.1%} |", memory, lasts


def main(*words: str) -> int:
    """Print the table; return 1 if an estimate misses by more than the limits."""
    sizes = TINY if "--cpu" in words else Sizes()
    if sizes.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is visible; --cpu runs a tiny model without one", file=sys.stderr)
        return 1
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if sizes.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    guesses: list[Estimate] = []
    if rank == 0:  # the other ranks wait for the real process group
        hardware = calibrate((ranks,)) if sizes.device == "cuda" else Hardware.load("this-machine")
        guesses = [estimated(case, sizes, hardware, ranks) for case in cases(ranks)]
    if ranks > 1:
        dist.init_process_group("nccl" if sizes.device == "cuda" else "gloo", timeout=timedelta(minutes=30))
    found = [measured(case, sizes, ranks) for case in cases(ranks)]
    if ranks > 1:
        dist.destroy_process_group()
    return _print_table(sizes, ranks, guesses, found) if rank == 0 else 0


def _print_table(sizes: Sizes, ranks: int, guesses: list[Estimate], found: list[Measured]) -> int:
    where = torch.cuda.get_device_name() if sizes.device == "cuda" else sizes.device
    what = f"GPT-2 with {sizes.layers} layers of hidden size {sizes.hidden}, AdamW, batch {sizes.batch} x {sizes.sequence}"
    print(f"\n{where}, torch {torch.__version__}, ranks: {ranks}, {what}\n")
    print("| case | memory, estimate (MiB) | measured | error | step, estimate (ms) | measured | error |")
    print("|---|---|---|---|---|---|---|")
    missed = False
    for case, guess, one in zip(cases(ranks), guesses, found, strict=True):
        line, memory, lasts = row(case, guess, one)
        print(line, flush=True)
        missed |= abs(memory) > MEMORY_LIMIT or (sizes.device == "cuda" and abs(lasts) > TIME_LIMIT)
    if missed:
        print(f"an estimate misses memory by over {MEMORY_LIMIT:.0%}, or time by over {TIME_LIMIT:.0%}", file=sys.stderr)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
