"""A pipeline of real processes follows a number of the model that changes between its steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import SlapoError, build, create_schedule
from slapo_testing import run_distributed

pytestmark = pytest.mark.multiproc


class Tempered(nn.Module):
    """Scales by a number in both of its stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.b(self.a(x * self.temperature)) * self.temperature).mean()}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def _steps(rank: int) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model, x = Tempered(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    schedule = create_schedule(model, mesh=mesh, example_inputs={"x": x[:2]})
    schedule["a"].cut_pipeline_stage()
    engine: Any = build(schedule, "torch", optimizer=sgd, microbatches=2)
    losses = []
    for temperature in (1.0, 5.0, 2.0):
        model.temperature = plain.temperature = temperature
        losses.append((float(engine.train_batch(x=x)), float(plain(x)["loss"])))
        losses.append((float(engine.eval_batch(x=x)), float(plain(x)["loss"])))
    engine.close()
    return losses


def test_a_number_that_changes_between_steps() -> None:
    for losses in run_distributed(_steps, 2):
        for found, expected in losses:
            assert found == pytest.approx(expected, abs=1e-6)


class Auxiliary(nn.Module):
    """Has a head for training alone, registered before everything else, used at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.aux, self.a, self.b = nn.Linear(8, 1), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.b(self.a(x))
        return {"loss": self.aux(h).mean() if self.training else h.mean()}


def _train_after_eval(rank: int) -> str:
    model, x = Auxiliary().eval(), torch.randn(4, 8)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    schedule = create_schedule(model, mesh=mesh, example_inputs={"x": x[:2]})
    schedule["a"].cut_pipeline_stage()
    engine: Any = build(schedule, "torch", optimizer=sgd, microbatches=2)
    engine.eval_batch(x=x)
    try:
        engine.train_batch(x=x)
    except SlapoError as err:
        return str(err)
    finally:
        engine.close()
    return "no error"


def test_a_weight_that_only_a_later_plan_uses_in_another_stage() -> None:
    for message in run_distributed(_train_after_eval, 2):
        assert (
            "stage 1 uses 'aux.bias' on these inputs in train mode, but the first plan left it with stage 0; build" in message
        )
