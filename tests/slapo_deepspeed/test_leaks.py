"""An engine that could not be built, or is closed, leaves neither its process group nor hooks behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slapo_core.build import build
from slapo_core.schedule import create_schedule
from slapo_core.testing import run_distributed
from tests.engines import PLUGINS
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

OPTIONS: dict[str, Any] = {"optimizer": adamw, "loss_fn": nn.functional.mse_loss}


def test_a_build_that_fails_leaves_no_process_group() -> None:
    schedule = create_schedule(nn.Linear(2, 2), plugins=PLUGINS)
    for _ in range(2):
        message = message_of(lambda: build(schedule, "deepspeed", **OPTIONS, config={"scheduler": {"type": "Nobodys"}}))
        assert "Nobodys" in message
        assert not dist.is_initialized()


def closed(rank: int) -> int:
    """How many hooks the parameters of a closed engine still have."""
    model = nn.Linear(2, 2)
    schedule = create_schedule(model, mesh=mesh_of(dp=2), plugins=PLUGINS)
    engine = build(schedule, "deepspeed", **OPTIONS, config={"zero_optimization": {"stage": 2}})
    engine.train_batch(input=torch.ones(2, 2), labels=torch.ones(2, 2))
    engine.close()
    return sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())


@pytest.mark.multiproc
def test_a_closed_engine_takes_its_hooks_off() -> None:
    assert run_distributed(closed, 2) == [0, 0]
