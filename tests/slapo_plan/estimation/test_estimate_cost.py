"""Python calls of an estimate, which do not grow with the number of replicas."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import create_schedule
from slapo_plan import estimate, fake_ranks

BATCH = {"x": torch.ones(2, 512)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def calls_of_estimate(replicas: int, options: Mapping[str, Any]) -> int:
    """Return the number of Python functions that an estimate calls."""
    with fake_ranks(dp=replicas) as mesh:
        sch = create_schedule(Net(), mesh=mesh, example_inputs=BATCH)
        calls = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            found = estimate(sch, BATCH, **options)
        finally:
            sys.setprofile(before)
    assert not found.problems
    return calls


@pytest.mark.parametrize("data_parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_replicas_cost_no_calls(data_parallel: str, optimizer: Any) -> None:
    options = {"data_parallel": data_parallel, "optimizer": optimizer}
    calls_of_estimate(4, options)  # fills caches
    assert calls_of_estimate(512, options) < 1.2 * calls_of_estimate(8, options)
