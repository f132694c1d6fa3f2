"""Seconds of stages."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from slapo_plan import Hardware, Plan, plan
from slapo_plan.search.stage_costs import StageCost, seconds_after


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


@cache
def planned(hardware: str, half: bool = False) -> Plan:
    model, batch = Net(), {"x": torch.zeros(1, 64)}
    if half:
        model, batch = model.bfloat16(), {"x": torch.zeros(1, 64, dtype=torch.bfloat16)}
    wanted = {"tp": 1, "pp": 1, "rows": 4}
    return plan(model, batch, ranks=2, global_batch=8, hardware=hardware, constraints=wanted, check=1)


def test_stages_of_one_rank_end_one_after_the_other() -> None:
    stages = [StageCost(rank, (), 0, 1.0, 2.0, after) for rank, after in ((0, 1.0), (1, 3.0), (0, 2.5), (1, 0.25))]
    assert seconds_after(stages) == 3.5


def test_gathers_take_the_time_of_a_cpu() -> None:
    plans = {each.layout.data_parallel: each.stages[0] for each in planned("this-machine")}
    assert plans["fsdp"].forward > plans["ddp"].forward + Hardware.load("this-machine").link.latency


@pytest.mark.parametrize("half", [False, True])
def test_the_utilization_is_of_the_peak_of_the_type_that_the_model_computes_in(half: bool) -> None:
    peak = Hardware.load("h100").peak_flops(torch.bfloat16 if half else torch.float32)
    for each in planned("h100", half):
        assert each.mfu == pytest.approx(each.flops / (each.step_seconds * 2 * peak))
