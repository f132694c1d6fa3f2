"""The example plugin does what its README says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_example import plugin


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_freeze_stops_gradients_and_computes_the_same(model: nn.Module) -> None:
    x = torch.randn(2, 4)
    before = model(x)
    sch = create_schedule(model)
    sch["0"].freeze()
    after = sch.mod(x)
    after.sum().backward()
    assert torch.equal(before, after)
    assert sch["0"].mod.weight.grad is None
    assert sch["1"].mod.weight.grad is not None


def test_undo_takes_freeze_back(model: nn.Module) -> None:
    sch = create_schedule(model)
    sch["0"].freeze()
    sch.undo()
    assert all(weight.requires_grad for weight in sch.mod.parameters())


def test_build_logs_what_is_frozen(model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["1"].freeze()
    build(sch)
    assert "2 parameters are frozen, 1.weight the first" in capsys.readouterr().err
