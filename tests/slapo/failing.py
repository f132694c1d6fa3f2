"""Ranks of a job that one of them ends: ``torchrun -m tests.slapo.failing TARGET AXIS END RANK``."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import build, create_schedule

MESSAGE = "no such luck"


class Fails(nn.Linear):
    """A layer, until it is told how to end."""

    end = ""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.end:
            print(f"ending at {time.time()}", flush=True)
        if self.end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.end == "raises":
            raise ValueError(MESSAGE)
        return super().forward(input)


def train(target: str, axis: str, end: str, rank: int) -> None:
    """Train two ranks, of which one ends within the second step.

    Args:
        target: Dialect.
        axis: Of the mesh, ``"pp"`` or ``"dp"``.
        end: How it ends, ``"raises"`` or ``"killed"``.
        rank: Which.
    """
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    sizes = [2 if name == axis else 1 for name in ("pp", "dp", "tp")]
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("pp", "dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Fails(4, 4), nn.Linear(4, 4), Fails(4, 4), nn.Linear(4, 4))
    schedule = create_schedule(model, mesh=mesh, example_inputs={"input": torch.zeros(2, 4)})
    if axis == "pp":
        schedule["1"].cut_pipeline_stage()

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    engine = build(schedule, target, optimizer=sgd, loss_fn=nn.functional.mse_loss, microbatches=2)
    for step in range(4):
        if step == 1 and dist.get_rank() == rank:
            Fails.end = end
        engine.train_batch(input=torch.ones(4, 4), labels=torch.ones(4, 4))
        print(f"rank {dist.get_rank()} took step {step}", flush=True)


if __name__ == "__main__":
    train(*sys.argv[1:4], int(sys.argv[4]))
