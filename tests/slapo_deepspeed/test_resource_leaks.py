"""An engine that could not be built, or is closed, leaves neither its process group nor hooks behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__

from slapo_core import build, create_schedule
from slapo_testing import run_distributed
from slapo_training.engines.open_engines import abandon_stale
from tests.engines import PLUGINS
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

OPTIONS: dict[str, Any] = {"optimizer": adamw, "loss_fn": nn.functional.mse_loss}


def test_a_build_that_fails_leaves_no_process_group() -> None:
    schedule = create_schedule(nn.Linear(2, 2), plugins=PLUGINS)
    for _ in range(2):
        message = message_of(lambda: build(schedule, "deepspeed", **OPTIONS, config={"scheduler": {"type": "Nobodys"}}))
        assert "Nobodys" in message
        assert not dist.is_initialized()


def closed(rank: int, stage: int) -> tuple[int, bool, bool]:
    """How many hooks a closed engine's parameters still have, and whether torch's linear was another one, and is again."""
    linear = nn.functional.linear
    model = nn.Linear(2, 2)
    schedule = create_schedule(model, mesh=mesh_of(dp=2), plugins=PLUGINS)
    engine = build(schedule, "deepspeed", **OPTIONS, config={"zero_optimization": {"stage": stage}})
    engine.train_batch(input=torch.ones(2, 2), labels=torch.ones(2, 2))
    replaced = nn.functional.linear is not linear
    engine.close()
    hooks = sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())
    return hooks, replaced, nn.functional.linear is linear


@pytest.mark.multiproc
@pytest.mark.parametrize("stage", [2, 3])
def test_a_closed_engine_takes_its_hooks_off_and_puts_torchs_linear_back(stage: int) -> None:
    assert run_distributed(closed, 2, stage) == [(0, stage == 3, True)] * 2


def _trained(stage: int) -> weakref.ref[nn.Module]:
    """The model of an engine that nobody closes, of a process group that is gone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    schedule = create_schedule(model, mesh=mesh_of(), plugins=PLUGINS)
    engine = build(schedule, "deepspeed", **OPTIONS, config={"zero_optimization": {"stage": stage}})
    engine.train_batch(input=torch.ones(2, 2), labels=torch.ones(2, 2))
    dist.destroy_process_group()
    return weakref.ref(model)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_next_build_frees_an_engine_whose_process_group_is_gone(stage: int) -> None:
    linear = nn.functional.linear
    first = _trained(stage)
    _trained(stage)
    gc.collect()
    assert first() is None
    abandon_stale()
    assert nn.functional.linear is linear
