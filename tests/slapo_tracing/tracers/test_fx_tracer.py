"""Traces without example inputs, by ``torch.fx``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

from slapo_core import TraceError, UnknownNameError, create_schedule
from slapo_tracing import trace, trace_module
from slapo_tracing.graphs import TracedModule

X = torch.randn(2, 4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.heads, self.drop = nn.Linear(4, 4), 2, nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        y = self.fc(x).view(x.shape[0], self.heads, -1).flatten(1)
        if mask is not None:
            y = y * mask
        return self.drop(y) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x), scale=2.0)


def assert_same(traced: nn.Module, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    torch.manual_seed(0)
    expected = model(*args, **kwargs)
    torch.manual_seed(0)
    torch.testing.assert_close(traced(*args, **kwargs), expected)


class MyTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Layer)


@pytest.mark.parametrize("options", [{}, {"tracer": "pytorch"}, {"tracer": "fx"}, {"tracer": fx.Tracer}, {"flatten": True}])
def test_any_shape_and_what_else_a_call_may_be(options: dict[str, Any]) -> None:
    model = Layer()
    traced = trace(model, **options)
    assert isinstance(traced, TracedModule)
    for x in (X, torch.randn(7, 4)):
        assert_same(traced, model, x)
        assert_same(traced, model, x, torch.ones(4))
        assert_same(traced, model, x, scale=3.0)
    traced.heads = model.heads = 4
    assert_same(traced, model, X)
    traced.eval(), model.eval()
    assert_same(traced, model, X)
    assert_same(copy.deepcopy(traced), model, X, mask=torch.zeros(4))


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({}, {"", "first", "second"}),
        ({"recursive": False}, {""}),
        ({"flatten": True}, {""}),
        ({"leaf_modules": ["Layer"]}, {""}),
        ({"leaf_modules": ["second"]}, {"", "first"}),
        ({"tracer": MyTracer}, {"", "first", "second"}),
    ],
)
def test_what_gets_a_graph(options: dict[str, Any], graphs: set[str]) -> None:
    for tracer in (trace, trace_module, lambda model, **options: create_schedule(model).trace(**options).mod):
        model = Net()
        plain, traced = copy.deepcopy(model), tracer(model, **options)
        assert {path for path, module in traced.named_modules() if isinstance(module, TracedModule)} == graphs
        for x in (X, torch.randn(3, 4)):
            assert_same(traced, plain, x)


def test_concrete_arguments_are_part_of_the_graph() -> None:
    model = Layer()
    traced = trace(model, concrete_args={"scale": 5.0}, tracer="pytorch")
    assert "5.0" in str(traced.graph)
    assert_same(traced, model, X, scale=5.0)
    assert_same(traced, model, X)
    masked = trace(model, example_inputs=(X, torch.ones(4)), tracer="pytorch", concrete_args={"scale": 2.0})
    assert [str(node.target) for node in masked.graph.find_nodes(op="placeholder")] == ["x", "mask"]
    assert_same(masked, model, X, torch.zeros(4), 2.0)
    assert_same(masked, model, X)


def test_a_part_of_a_schedule_without_inputs() -> None:
    model = Net()
    plain = copy.deepcopy(model)
    sch = create_schedule(model)
    sch["first"].trace()
    sch["second"].trace(tracer="pytorch", leaf_modules=["Dropout"])
    assert_same(sch.mod, plain, torch.randn(3, 4))
    sch.undo(), sch.undo()
    assert type(model.first) is type(model.second) is Layer


def test_what_it_cannot_do() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(TraceError, match="tracer 'fx' cannot trace Branch: .*; give example_inputs"):
        trace(Branch())
    with pytest.raises(UnknownNameError, match="no tracer 'symbolic'; .*available: .*pytorch"):
        trace(Branch(), tracer="symbolic")
    model = nn.Sequential(Branch(), Layer())
    traced: Any = trace(model)
    assert isinstance(traced.get_submodule("0"), Branch)
    assert_same(traced, model, X)
