"""Cost of the checks before an engine's first step, in ordinary steps.

Run ``python -m benchmarks.first_step``; it prints a section for ``benchmarks/README.md``. In each case several new engines take
some steps of the same batch; the time of the checks in the first one is divided by the median time of the later ones, on the
rank that has more to do. A step is forward, backward, reduction and AdamW. Times are those of the process: other processes of
the machine, and waiting for other ranks, have no part in them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.peers.rounds import in_new_processes
from benchmarks.sharding import blocks
from slapo_core import build, create_schedule
from slapo_training.first_step import FirstStep

LAYERS, HIDDEN, SEQUENCE, CHANNELS = 6, 256, 128, 32
ENGINES, STEPS = 3, 3
ADAMW = partial(torch.optim.AdamW, lr=1e-4)


class Penalised(torch.autograd.Function):
    """Adds the gradient of a penalty in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient + 1e-3 * ctx.saved_tensors[0] / len(gradient)


class Injecting(nn.Module):
    """Injects a gradient behind a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Penalised.apply(x)


def gpt(*between: nn.Module) -> nn.Module:
    return nn.Sequential(*blocks(HIDDEN, layers=LAYERS), *between)


def convolutions() -> nn.Module:
    """A net with a BatchNorm behind each of six convolutions."""
    layers: list[nn.Module] = []
    for index in range(LAYERS):
        layers += [nn.Conv2d(CHANNELS if index else 3, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT blocks": gpt,
    "with dropout": lambda: gpt(nn.Dropout(0.1)),
    "injecting gradients": lambda: gpt(Injecting()),
    "convolutions, BatchNorm": convolutions,
}
CASES: list[tuple[str, str, dict[str, int], int]] = [
    ("GPT blocks", "torch", {"dp": 2}, 1),
    ("GPT blocks", "torch", {"dp": 2}, 4),
    ("GPT blocks", "torch", {"pp": 2}, 4),
    ("GPT blocks", "deepspeed", {"dp": 2}, 1),
    ("GPT blocks", "megatron", {"dp": 2}, 1),
    ("with dropout", "torch", {"dp": 2}, 1),
    ("with dropout", "torch", {"dp": 2}, 4),
    ("injecting gradients", "torch", {"dp": 2}, 1),
    ("injecting gradients", "torch", {"dp": 2}, 4),
    ("convolutions, BatchNorm", "torch", {"dp": 2}, 1),
    ("convolutions, BatchNorm", "torch", {"dp": 2}, 4),
]
"""Model, engine, layout, micro-batches."""


def batch(model: str, microbatches: int) -> dict[str, torch.Tensor]:
    """Four rows in each micro-batch of a replica; of images sixteen."""
    torch.manual_seed(1 + dist.get_rank())
    if model.startswith("conv"):
        return {"input": torch.randn(16 * microbatches, 3, 32, 32), "labels": torch.randn(16 * microbatches, 10)}
    x, y = torch.randn(2, 4 * microbatches, SEQUENCE, HIDDEN).unbind()
    return {"input": x, "labels": y}


def measure(rank: int, model: str, target: str, layout: dict[str, int], microbatches: int) -> tuple[float, float]:
    """Median seconds of the checks and of a later step."""
    torch.set_num_threads(1)
    sizes = [layout.get(axis, 1) for axis in ("pp", "dp", "tp")]
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("pp", "dp", "tp"))
    checks: list[float] = []
    ordinary = FirstStep.check

    def timed(self: FirstStep, *args: Any, **kwargs: Any) -> None:
        start = time.process_time()
        ordinary(self, *args, **kwargs)
        checks.append(time.process_time() - start)

    FirstStep.check = timed  # type: ignore[method-assign]
    first, later = [], []
    for _ in range(ENGINES):
        checks.clear()
        rows = batch(model, microbatches)
        if layout.get("pp"):
            dist.broadcast(rows["input"], 0)
            dist.broadcast(rows["labels"], 0)
        torch.manual_seed(0)
        sch = create_schedule(MODELS[model](), mesh=mesh, example_inputs={"input": rows["input"][:4]})
        if layout.get("pp"):
            sch.pipeline(layout["pp"])
        engine = build(sch, target, optimizer=ADAMW, loss_fn=F.mse_loss, microbatches=microbatches)
        for step in range(STEPS + 1):
            dist.barrier()
            start = time.process_time()
            engine.train_batch(**rows)
            if step:
                later.append(time.process_time() - start)
        first.append(checks[0])
        engine.close()
    return median(first), median(later)


def main() -> None:
    """Print the section."""
    print(f"\n## First-step checks: {LAYERS} GPT blocks, hidden size {HIDDEN}, 4 x {SEQUENCE} tokens in a micro-batch, fp32\n")
    print("| model | engine | layout | micro-batches | a step (ms of CPU) | checks, once (ms of CPU) | checks / step |")
    print("|---|---|---|---|---|---|---|")
    for model, target, layout, microbatches in CASES:
        found = in_new_processes(measure, 2, model, target, layout, microbatches)
        check, step = max(each[0] for each in found), max(each[1] for each in found)
        axes = ", ".join(f"{axis} {size}" for axis, size in layout.items())
        print(
            f"| {model} | {target} | {axes} | {microbatches} | {step * 1e3:.0f} | {check * 1e3:.0f} | **{check / step:.2f}** |",
            flush=True,
        )
    print(
        f"\nMedians of {ENGINES} new engines, and of {STEPS} later steps of each. A micro-batch of convolutions "
        "has 16 images of 32 x 32."
    )


if __name__ == "__main__":
    main()
