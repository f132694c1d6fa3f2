"""Tensors that a forward assigns to attributes and does not read in the next call are recorded in the graph or returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slapo_core import TraceError
from slapo_tracing import trace
from slapo_tracing.tracers import trace_again
from tests.slapo_tracing.tracers.test_value_tracer import Forward

X = torch.randn(2, 4)


def keep(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.kept != x.shape[1]:
        self.kept, self.made = x.shape[1], torch.arange(x.shape[1])
    self.map = self.fc(x).softmax(-1)
    self.last = {"mean": x.mean(), "rows": x.shape[0]}
    return self.map * self.made


def returned(model: Forward, x: torch.Tensor) -> tuple[Any, Any]:
    graph, _, constants = trace_again(model, (x,), {}, frozenset(), "returned")
    assert not constants
    return next(iter(graph.find_nodes(op="output"))).args[0]  # type: ignore[return-value]


def test_values_in_attributes() -> None:
    model = Forward(keep)
    model.kept = None
    _, assigned = returned(model, X)
    assert [*assigned] == ["map", "last"]  # and nothing of the cache
    assert (assigned["map"].name, assigned["last"]["rows"].target) == ("softmax", "size")
    assert model.kept is None
    assert not hasattr(model, "map")
    traced = trace(model, example_inputs=(X,), flatten=True, assigned="noted")
    assert {node.name: names for node in traced.graph.nodes if (names := node.meta.get("assigned"))} == {
        "softmax": ["map"],
        "mean": ["last"],
    }
    with pytest.raises(TraceError, match="assigns to its attribute 'map'"):
        trace(model, example_inputs=(X,), flatten=True)


def keep_kind(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kind = "wide" if x.shape[1] > 4 else "narrow"
    return self.fc(x)


def test_a_constant_that_was_there_before() -> None:
    model = Forward(keep_kind)
    model.kind = "narrow"
    assert returned(model, X)[1] == {"kind": "narrow"}


def add_up(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept = x.mean() if self.kept is None else self.kept + x.mean()
    return x


def of_the_first_call(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.kept is None:
        self.kept = x.mean()
    return x * 2


def in_a_dict(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.maps["x"] = x.mean()
    return x * 2


@pytest.mark.parametrize("function", [add_up, of_the_first_call, in_a_dict])
@pytest.mark.parametrize("assigned", ["noted", "returned"])
def test_what_depends_on_the_call_before_is_refused(function: Any, assigned: Any) -> None:
    model = Forward(function)
    model.kept, model.maps = None, {}
    with pytest.raises(TraceError, match="assigns to its attribute '(kept|maps)'"):
        trace(model, example_inputs=(X,), flatten=True, assigned=assigned)
