"""The norm of all gradients where a stage has nothing to train."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import slapo_pipeline.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Program, Registry, Stage, build, create_schedule
from slapo_testing import run_distributed
from slapo_torch.step.local_parameters import LocalParameters

from ..layouts import mesh_of

pytestmark = pytest.mark.multiproc


def _device_of_norm(rank: int) -> list[str]:
    mesh = init_device_mesh("meta", (1, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
    found = []
    for model in (nn.Linear(2, 2).requires_grad_(False), nn.Tanh()):
        program = Program(model, (Stage(0, model),), mesh)
        found.append(LocalParameters(program, model).clip(1.0).device.type)
    return found


def test_it_is_summed_over_the_stages_on_the_device_of_the_mesh() -> None:
    assert run_distributed(_device_of_norm, 1) == [["meta"] * 2]


def _norms(rank: int) -> list[float | None]:
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4), torch.randn(4, 4)
    model[0].requires_grad_(False)
    F.mse_loss(model(x), y).backward()
    expected = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin])
    schedule = create_schedule(model, mesh=mesh_of(pp=2), example_inputs={"input": x}, plugins=plugins)
    schedule["0"].cut_pipeline_stage()
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine: Any = build(schedule, "torch", optimizer=sgd, loss_fn=F.mse_loss, microbatches=2, clip=0.1)
    engine.train_batch(input=x, labels=y)
    return [engine.grad_norm, expected]


def test_it_is_the_same_on_the_stage_that_has_none() -> None:
    for found, expected in run_distributed(_norms, 2):
        assert found == pytest.approx(expected, abs=1e-6)
