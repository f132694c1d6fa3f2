"""Refusals: a forward that cannot be a graph is an error that names the model's own line; nothing is silently wrong."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from slapo_core import TraceError, UnknownNameError
from slapo_tracing import trace_module
from tests.slapo_tracing.tracers.test_value_tracer import Box, Forward

X = torch.randn(2, 4)
HERE = r"test_refusals.py:\d+"


@pytest.mark.parametrize(
    ("function", "asked"),
    [
        (lambda self, x: x if x.sum() > 0 else -x, "bool"),
        (lambda self, x: x * x.max().item(), "item"),
        (lambda self, x: x[int(x.argmax())], "int"),
        (lambda self, x: x * sum(x[0].tolist()), "tolist|item"),
        (lambda self, x: x * float(self.scale.sum()), "float"),
        (lambda self, x: x + torch.from_numpy(x.detach().numpy()), "numpy"),
        (lambda self, x: x if 3.0 in x else -x, "contains"),
        (lambda self, x: x if torch.equal(x, self.table) else -x, "equal"),
        (lambda self, x: x if torch.rand([]) < 0.5 else -x, "bool"),
        (lambda self, x: [x, -x][torch.arange(4)[:1].add(x[0].long()[:1]).mul(0)], "index"),
    ],
)
def test_control_flow_on_data(function: Any, asked: str) -> None:
    with pytest.raises(TraceError, match=rf"asks for the values of a tensor \({asked}\).*{HERE}"):
        trace_module(Forward(function), (X,))


def test_a_constant_that_may_have_been_changed_through_a_view_is_not_known() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(4)
        table.view(2, 2)[0, 0] = x[0, 0]
        return x * float(table.sum())

    with pytest.raises(TraceError, match="float"):
        trace_module(Forward(forward), (X,))


def test_a_tensor_from_nowhere() -> None:
    made: list[Any] = []

    def unseen(x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return x * 2

    for function in (lambda self, x: self.fc(unseen(x)), lambda self, x: made.append(x) or unseen(made[-1])):
        with pytest.raises(TraceError, match=rf"a tensor \[2, 4\] comes from code that tracing does not see.*{HERE}"):
            trace_module(Forward(function), (X,))


def test_a_tensor_from_nowhere_among_real_tensors() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            hidden = x[x > -100.0]
        return hidden.sum() + self.fc(x)

    with pytest.raises(TraceError, match="comes from code that tracing does not see"):
        trace_module(Forward(forward), (X,))


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_random_numbers_of_python(draw: Any) -> None:
    model = Forward(lambda self, x: x * float(draw()))
    with pytest.raises(TraceError, match="random numbers from Python or NumPy"):
        trace_module(model, (X,))
    inside = Forward(lambda self, x: self.noisy(x))
    inside.noisy = model
    trace_module(inside, (X,), leaf=lambda path, module: path == "noisy")


@pytest.mark.parametrize("weights", ["input", "weight"])
def test_hooks_on_tensors(weights: str) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x) if weights == "input" else self.fc.weight
        y.register_hook(lambda grad: grad * 3)
        return x + y.sum()

    model = Forward(forward)
    with pytest.raises(TraceError, match=rf"calls register_hook on a tensor.*{HERE}"):
        trace_module(model, (X,))
    inside = Forward(lambda self, x: self.hooked(x))
    inside.hooked = model
    trace_module(inside, (X,), leaf=lambda path, module: path == "hooked")


def test_assignments_to_the_module() -> None:
    def count(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls

    def average(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.table = 0.9 * self.table + x.mean(0)
        return x - self.table

    for function in (count, average):
        model = Forward(function)
        model.calls = 1
        table = model.table
        with pytest.raises(TraceError, match="assigns to its attribute '(calls|table)'"):
            trace_module(model, (X,))
        assert model.calls == 1
        assert model.table is table


def remember(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x if self.kept is None else x + self.kept
    self.kept = y.detach()
    return y


def collect(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.history.append(x.detach())
    return x + self.history[0]


def count_in_a_dict(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.counts["n"] += 1
    return x * self.counts["n"]


def count_from_none(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept = (self.kept or 0) + 1
    return x * self.kept


def count_deep_inside(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.counts["more"]["n"] += 1
    return x * self.counts["more"]["n"]


def count_in_an_object(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.box.content += 1
    return x * self.box.content


def count_in_a_set(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen.add(len(self.seen))
    return x * len(self.seen)


def first_call_only(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.kept is None:
        self.kept = torch.ones(4)
        return x
    return x * 2


def drawn_once(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.kept is None:
        self.kept = torch.randn(4)
    return x * self.kept


def of_the_first_input(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.kept is None:
        self.kept = x.mean()
    return x - self.kept


def of_a_weight(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.kept is None:
        self.kept = self.scale * 2
    return x * self.kept


def other_child(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.fc, self.fc2 = self.fc2, self.fc
    return self.fc(x)


@pytest.mark.parametrize(
    "function",
    [
        *(remember, collect, count_in_a_dict, count_from_none, count_deep_inside, count_in_an_object, count_in_a_set),
        *(first_call_only, drawn_once, of_the_first_input, of_a_weight, other_child),
    ],
)
def test_state_that_the_next_call_reads(function: Any) -> None:
    model = Forward(function)
    model.kept, model.history, model.counts, model.box, model.seen = None, [], {"n": 0, "more": {"n": 0}}, Box(0), set()
    children = (model.fc, model.fc2)
    with pytest.raises(TraceError, match="its attribute '(kept|history|counts|box|seen|fc)' or changes it"):
        trace_module(model, (X,))
    assert (model.kept, model.history, model.counts, model.seen) == (None, [], {"n": 0, "more": {"n": 0}}, set())
    assert model.box.content == 0
    assert (model.fc, model.fc2) == children


def test_what_a_forward_caches_is_gone_after_the_trace() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.length != x.shape[0]:
            self.length, self.cached = x.shape[0], self.table.cos()
            self.found["x"] = [self.cached + torch.ones(4)]
            self.register_buffer("late", self.cached + 1)
        self.table = self.table.to(x.dtype)
        return x + self.cached * self.found["x"][0] + self.late

    model = Forward(forward)
    model.length, model.cached, model.found = None, None, {}
    traced = trace_module(model, (X,))
    assert (model.length, model.cached, model.found) == (None, None, {})
    assert "late" not in dict(model.named_buffers())
    torch.testing.assert_close(traced(X), model(X))
    torch.testing.assert_close(traced(X), model(X))


def sliced(self: Any, x: torch.Tensor) -> torch.Tensor:
    length = x.shape[0]
    if self.kept is not None and self.kept.shape[-1] >= length:
        return x[0] + self.kept[:length, :length]
    self.kept = torch.ones(length, length).triu(1)
    return x[0] + self.kept


def test_a_cache_that_is_sliced() -> None:
    model = Forward(lambda self, x: sliced(self, x))
    model.kept = None
    traced = trace_module(model, (torch.ones(4, 4),))
    torch.testing.assert_close(traced(torch.ones(4, 4)), model(torch.ones(4, 4)))


def flipped(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept = torch.arange(4.0) if self.kept is None else self.kept[[3, 2, 1, 0]]
    return x + self.kept


def shifted(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept = torch.arange(4.0) if self.kept is None else self.kept[1:]
    return x + self.kept[:1]


@pytest.mark.parametrize("function", [flipped, shifted])
def test_a_cache_that_is_read_otherwise(function: Any) -> None:
    model = Forward(function)
    model.kept = None
    with pytest.raises(TraceError, match="its attribute 'kept' or changes it"):
        trace_module(model, (X,))


def test_a_number_that_changes_inside_a_module_kept_whole() -> None:
    model = Forward(lambda self, x: self.inner(x) * self.inner.calls)
    model.inner = Forward(lambda self, x: setattr(self, "calls", self.calls + 1) or x)
    model.inner.calls = 0
    with pytest.raises(TraceError, match="reads the attribute 'calls' of 'inner', which changes inside a module kept whole"):
        trace_module(model, (X,), leaf=lambda path, module: path == "inner")


def test_a_list_that_the_forward_fills() -> None:
    def forward(self: Any, x: torch.Tensor, y: list[Any]) -> torch.Tensor:
        y.append(x)
        return x

    with pytest.raises(TraceError, match="changes a list or dict it was given"):
        trace_module(Forward(forward), (X, []))


def test_errors_of_the_forward_name_its_line() -> None:
    with pytest.raises(TraceError, match=rf"the forward does not run: RuntimeError: .*{HERE}"):
        trace_module(Forward(lambda self, x: x @ x), (X,))
    with pytest.raises(TraceError, match="missing a required argument: 'x'$"):
        trace_module(Forward(lambda self, x: x), {})


def test_hooks_on_the_module_itself() -> None:
    model = Forward(lambda self, x: x)
    model.register_forward_hook(lambda *args: None)
    with pytest.raises(TraceError, match="has hooks or a wrapped forward"):
        trace_module(model, (X,))


def test_unknown_tracer() -> None:
    with pytest.raises(UnknownNameError, match="no tracer 'vale'; did you mean 'value'"):
        trace_module(nn.Linear(4, 4), (X,), tracer="vale")
