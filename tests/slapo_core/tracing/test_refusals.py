"""What cannot be a graph is an error that names the model's own line; nothing is silently wrong."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
from torch import is_grad_enabled, nn

from slapo_core.errors import TraceError, UnknownNameError
from slapo_core.tracing import trace, trace_module
from tests.slapo_core.tracing.test_value import Box, Forward

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


# ---- calls that differ from the trace


def test_calls_that_differ() -> None:
    model = Forward(lambda self, x, y=None: x if y is None else x * y)
    traced = trace_module(model, (X,))
    for args, what in [
        ((torch.randn(3, 4),), r"x is a tensor \[3, 4\] float32, traced as a tensor \[2, 4\] float32"),
        ((X.double(),), "x is a tensor .* float64, traced as"),
        ((X, 2.0), r"y is 2.0, traced as None"),
        ((X, X), r"y is a tensor .*, traced as None"),
    ]:
        with pytest.raises(TraceError, match=what):
            traced(*args)
    traced = trace_module(model, (X, {"a": [1, X]}.get("a")[0]))
    with pytest.raises(TraceError, match="y is True, traced as 1"):
        traced(X, True)
    torch.testing.assert_close(traced(x=X, y=1), X)


def test_the_place_of_a_difference_is_named() -> None:
    traced = trace_module(Forward(lambda self, x, y: x + y["a"][1]), (X, {"a": [1, X]}))
    with pytest.raises(TraceError, match=r"y\['a'\]\[0\] is 2, traced as 1"):
        traced(X, {"a": [2, X]})


def test_another_mode() -> None:
    traced = trace_module(Forward(lambda self, x: x).train(), (X,))
    with pytest.raises(TraceError, match="is in eval mode but was traced in train mode"):
        traced.eval()(X)


# ---- questions whose answers are part of the graph


@pytest.mark.parametrize("tracer", [trace_module, trace])
@pytest.mark.parametrize(
    ("ask", "question"),
    [
        (lambda self, x: torch.is_grad_enabled(), "is_grad_enabled"),
        (lambda self, x: is_grad_enabled(), "is_grad_enabled"),
        (lambda self, x: (x * self.scale).requires_grad, "requires_grad"),
        (lambda self, x: (x * self.scale).grad_fn is not None, "is_leaf"),
    ],
)
def test_the_gradient_mode_is_asked_for(ask: Any, question: str, tracer: Any) -> None:
    model = Forward(lambda self, x: self.inner(x) + 1)
    model.inner = Forward(lambda self, x: x * self.scale if ask(self, x) else x - self.scale)
    traced = tracer(model, example_inputs=(X,))
    torch.testing.assert_close(traced(X), model(X))
    with torch.no_grad():
        with pytest.raises(TraceError, match=f"the forward asks for {question}, which is .*, traced as .*; trace again"):
            traced(X)
        traced = tracer(model, example_inputs=(X,))
        torch.testing.assert_close(traced(X), model(X))
    with pytest.raises(TraceError, match=f"the forward asks for {question}"):
        traced(X)


def test_a_mode_that_the_forward_sets_itself_is_known() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            table = x.cos() if torch.is_grad_enabled() else x.sin()
        return x * table * self.scale

    model = Forward(forward)
    traced = trace_module(model, (X,))
    torch.testing.assert_close(traced(X), model(X))
    with torch.no_grad():
        torch.testing.assert_close(traced(X), model(X))


def test_a_weight_that_is_frozen_after_the_trace() -> None:
    model = Forward(lambda self, x: x * self.scale if self.scale.requires_grad else x)
    traced = trace_module(model, (X,))
    model.scale.requires_grad_(False)
    with pytest.raises(TraceError, match="asks for requires_grad, which is False in this call, traced as True"):
        traced(X)


@pytest.mark.parametrize("question", ["is_contiguous", "stride", "storage_offset"])
def test_the_layout_of_an_input_is_asked_for(question: str) -> None:
    traced = trace_module(Forward(lambda self, x: x if getattr(x, question)() in (True, (4, 1), 0) else -x), (X,))
    torch.testing.assert_close(traced(X), X)
    with pytest.raises(TraceError, match=f"asks for {question}, which is"):
        traced(torch.randn(4, 3)[:, 1:].t())


# ---- numbers of the model that the graph has taken over


def test_attributes_that_change_after_the_trace() -> None:
    model = Forward(lambda self, x: self.inner(x) * self.number * self.box.content["deep"] if self.inner.flag else x)
    model.number, model.box, model.inner = 2.0, Box({"deep": 3.0}), Forward(lambda self, x: torch.relu(x) * self.number)
    model.inner.flag, model.inner.number = True, 1.0
    traced = trace_module(model, (X,))
    for holder in (traced, model):
        for change, back, what in [
            (lambda: setattr(holder, "number", 5.0), lambda: setattr(holder, "number", 2.0), "number is 5.0, traced as 2.0"),  # noqa: B023
            (lambda: model.box.content.update(deep=4.0), lambda: model.box.content.update(deep=3.0), "is 4.0, traced as 3.0"),
            (lambda: setattr(model.inner, "flag", False), lambda: setattr(model.inner, "flag", True), r"inner.flag is False"),
            (lambda: setattr(model.inner, "number", 1), lambda: setattr(model.inner, "number", 1.0), r"inner.number is 1,"),
        ]:
            change()
            with pytest.raises(TraceError, match=f"attribute .*{what}.*; trace again"):
                traced(X)
            back()
            torch.testing.assert_close(traced(X), model(X))
    model.unread = 1
    traced(X)


def test_a_config_that_the_forward_fills() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.box.content = self.box.content or "kind"
        return x * self.box.factor

    model = Forward(forward)
    model.box = Box(None)
    model.box.factor = 2.0
    traced = trace_module(model, (X,))
    assert model.box.content is None
    for _ in range(2):
        torch.testing.assert_close(traced(X), model(X))
    model.box.factor = 3.0
    with pytest.raises(TraceError, match=r"attribute box\['(factor|content)'\] is"):
        traced(X)


def test_the_mode_of_a_part() -> None:
    model = Forward(lambda self, x: self.fc(self.inner(x)))
    model.inner = Forward(lambda self, x: x * 2 if self.training else self.fc(x))
    traced = trace_module(model, (X,))
    traced.inner.eval()
    with pytest.raises(TraceError, match="attribute inner.training is False, traced as True"):
        traced(X)


def test_copies_have_attributes_of_their_own() -> None:
    model = Forward(lambda self, x: x * self.number * self.plain)
    model.number, model.plain = 2.0, torch.ones(4)
    traced = trace_module(model, (X,))
    copied = copy.deepcopy(traced)
    model.number = copied.note = 5.0
    torch.testing.assert_close(copied(X), X * 2)
    copied.number = 3.0
    with pytest.raises(TraceError, match="number is 3.0, traced as 2.0"):
        copied(X)
    copied.number, copied.plain = float("2"), torch.zeros(4)
    with pytest.raises(TraceError, match="plain is a tensor"):
        copied(X)
