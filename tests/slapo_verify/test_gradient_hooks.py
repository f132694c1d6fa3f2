"""Hooks of parameters are part of what is compared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import create_schedule
from slapo_verify import verify, verify_engine


def halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def halve(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    if kind == "tensor":
        made[0].weight.register_hook(halved)
    elif kind == "accumulated":
        made[0].weight.register_post_accumulate_grad_hook(halve)
    return made


@pytest.mark.parametrize("kind", ["tensor", "accumulated"])
def test_a_hook_that_one_model_lacks_is_a_difference(kind: str) -> None:
    inputs = torch.randn(3, 4)
    report = verify(model(kind), create_schedule(copy.deepcopy(model(kind)), example_inputs=inputs))  # torch copies no hooks
    assert [each.what for each in report.differences] == ["gradient of '0.weight'"]
    assert verify(model(kind), create_schedule(model(kind), example_inputs=inputs)).ok


@pytest.mark.parametrize("kind", ["tensor", "accumulated"])
def test_an_engine_trains_with_the_hooks_of_the_reference(kind: str) -> None:
    batch: dict[str, Any] = {"input": torch.randn(4, 4), "labels": torch.randn(4, 1)}
    given = {"loss_fn": nn.functional.mse_loss, "target": "torch"}
    with_hook = verify_engine(model(kind), create_schedule, batch, **given)
    without = verify_engine(model("none"), create_schedule, batch, **given)
    assert with_hook.ok
    assert without.ok
    updates = [report.trained.updates["0.weight"] for report in (with_hook, without) if report.trained is not None]
    torch.testing.assert_close(updates[0], updates[1] * 0.5)
