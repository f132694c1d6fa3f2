"""A rank of a job that trains right and then ends in one of several ways: ``python -m tests.slapo.ending AXIS END...``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import build, create_schedule

KEPT: list[Any] = []
"""Object that lives until the interpreter clears its modules."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train(axis: str, ends: list[str]) -> None:
    """Train two ranks for a step, then do what ``ends`` says, in its order.

    Args:
        axis: ``"pp"``, ``"dp"`` or ``"fsdp"``.
        ends: Of ``keep``, ``cycle``, ``save``, ``close``, ``destroy``, ``exit``, ``raise`` and ``raise_on_one``.
    """
    dist.init_process_group("gloo")
    sizes = [2 if name == axis.removeprefix("fs") else 1 for name in ("pp", "dp", "tp")]
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("pp", "dp", "tp"))
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Flatten()]
    x, labels = torch.randn(8, 3, 2, 2), torch.randint(0, 16, (8,))
    schedule = create_schedule(nn.Sequential(*layers), mesh=mesh, example_inputs=(x[:2],))
    if axis == "pp":
        schedule["2"].cut_pipeline_stage()
    options = {"data_parallel": "fsdp"} if axis == "fsdp" else {}
    engine: Any = build(schedule, "torch", optimizer=sgd, loss_fn=nn.functional.cross_entropy, microbatches=4, **options)
    engine.train_batch(input=x, labels=labels)
    print("trained", flush=True)
    groups = [dist.new_group() for _ in range(4)]
    for end in ends:
        if end in ("keep", "cycle"):
            KEPT.append(engine)
            engine.itself = engine if end == "cycle" else None
        elif end == "save":
            engine.save(Path(os.environ["CHECKPOINT"]), wait=False)
        elif end == "close":
            engine.close()
        elif end == "destroy":
            dist.destroy_process_group()
        elif end == "exit":
            be_late(groups)
            sys.exit(3)
        elif end == "raise" or dist.get_rank() == 1:
            raise ValueError("planned")
    if dist.is_initialized() and "raise_on_one" not in ends:
        be_late(groups)


def be_late(groups: list[Any]) -> None:
    """Leave collectives behind that are done, and whose threads get the interpreter's lock only where this one waits."""
    dist.barrier()
    sys.setswitchinterval(1000)
    for group in groups:
        dist.all_reduce(torch.ones(1000) + 1, group=group, async_op=True)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        pass


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2:])
