"""Modules, parameters and buffers with names that every traced module uses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, ScheduleError, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc


class Named(nn.Module):
    def __init__(self, up: str, scale: str = "scale") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names = up, scale
        self.add_module(up, nn.Linear(4, 8))
        self.register_buffer(scale, torch.full((4,), 2.0))
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, scale = (getattr(self, name) for name in self.names)
        return x + self.down(up(x * scale).relu())


def _named(rank: int) -> list[str]:
    messages, x = [], torch.ones(2, 4)
    for names in (("graph",), ("code",), ("meta",), ("recompile",), ("up", "graph"), ("up", "meta")):
        sch = create_schedule(
            Named(*names), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=(x,)
        )
        with pytest.raises(ScheduleError) as caught:
            sch.tensor_parallel()
        messages.append(str(caught.value))
    for names, options in ((("graph",), {"plan": {"graph": "colwise", "down": "rowwise"}}), (("forward_pass", "output"), {})):
        model = Named(*names)
        before = copy.deepcopy(model)
        build(
            create_schedule(
                model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=(x,)
            ).tensor_parallel(**options)
        )
        assert_equivalent(before, model, x)
    return messages


def test_reserved_names_are_refused_by_name() -> None:
    start = "tensor_parallel(''): the Named has a part with the name"
    end = "which every traced module uses itself; rename it, or give plan="
    names = ("graph", "code", "meta", "recompile", "graph", "meta")
    assert run_distributed(_named, 2) == [[f"{start} {name!r}, {end}" for name in names]] * 2
