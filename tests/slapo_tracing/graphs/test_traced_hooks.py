"""Hooks that say they may be recorded with the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import create_schedule
from slapo_tracing import trace
from slapo_tracing.nodes import is_opaque


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
    for x in (torch.ones(3), torch.ones(2, 3)):
        assert torch.equal(graph(x), model(x))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.sin()).cos()


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("rewritten", [True, False])
def test_a_hook_that_comes_after_the_trace_runs(traced: bool, times: int, rewritten: bool) -> None:
    """Also on a module inside of a graph that was rewritten and traced again."""
    x = torch.randn(2, 3)
    sch = create_schedule(Outer(), example_inputs=(x,))
    for time in range(times):
        sch.trace(flatten=True)
        if rewritten and time == 0:
            sch.replace(torch.tanh, lambda x: x.sin())
    handle = sch["inner"].mod.register_forward_pre_hook(Double(traced))
    first = torch.tanh if rewritten else torch.sin
    for given in (x, torch.randn(4, 3)):
        torch.testing.assert_close(sch.mod(given), (first(given) * 2 + 1).cos())
    handle.remove()
    for given in (x, torch.randn(4, 3), torch.randn(5, 3)):
        torch.testing.assert_close(sch.mod(given), (first(given) + 1).cos())
