"""A training step through an engine against the same step written by hand, on one GPU.

Run ``make gpu``. Prints rows for ``benchmarks/gpu/README.md``: milliseconds a step, medians, both sides in one run.
"""

from __future__ import annotations

import copy
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

from slapo_core import build, create_schedule

BATCH, SEQUENCE, WARM_UP, STEPS = 8, 1024, 5, 20


def milliseconds(step: Callable[[], object]) -> float:
    """Median time of a step, by CUDA events."""
    times = []
    for number in range(WARM_UP + STEPS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        end.synchronize()
        if number >= WARM_UP:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def by_hand(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> torch.Tensor:
    """What the engine is measured against."""
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def main() -> None:
    """Print the table."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (1, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
    adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    plain = GPT2LMHeadModel(GPT2Config(use_cache=False)).cuda()
    ids = torch.randint(0, 50257, (BATCH, SEQUENCE), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    sch = create_schedule(copy.deepcopy(plain), mesh=mesh, example_inputs=batch)
    engine = build(sch, "torch", optimizer=adamw, precision="bf16")
    optimizer = adamw(plain.parameters())
    peer = milliseconds(lambda: by_hand(plain, optimizer, batch))
    ours = milliseconds(lambda: engine.train_batch(**batch))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, GPT-2 124M, batch {BATCH} x {SEQUENCE}, bf16 autocast\n")
    print("| step | ms | ratio |\n|---|---|---|")
    print(f"| by hand | {peer:.2f} | 1 |\n| engine of `slapo.build` | {ours:.2f} | {ours / peer:.3f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
