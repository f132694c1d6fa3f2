"""Hooks that say they may be recorded with the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core.tracing.tracers import trace
from slapo_core.wrapping import is_opaque


class Double:
    """Doubles what a module is given."""

    def __init__(self, traced: bool) -> None:
        self.traced = traced

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] * 2,)


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.parametrize(("traced", "calls"), [(True, ["mul", "add"]), (False, ["0"])])
def test_a_hook_is_recorded_only_if_it_says_so(traced: bool, calls: list[str]) -> None:
    model = nn.Sequential(Inner())
    model[0].register_forward_pre_hook(Double(traced))
    assert is_opaque(model[0]) is not traced
    graph = trace(model, example_inputs=torch.ones(3), flatten=True)
    names = [getattr(node.target, "__name__", node.target) for node in graph.graph.nodes if node.op.startswith("call")]
    assert names == calls
    assert torch.equal(graph(torch.ones(3)), model(torch.ones(3)))
