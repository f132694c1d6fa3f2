"""A traced module is right whatever it is called with: by a graph it has, one traced for the call, or its own forward."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import is_grad_enabled, nn

from slapo_core import TraceError, create_schedule
from slapo_tracing import trace, trace_module
from tests.slapo_tracing.tracers.test_value_tracer import Box, Forward

X = torch.randn(2, 4)


def graphs(traced: Any) -> int:
    """Count the different graphs of a traced module."""
    return 1 + len(traced._variants.others)


class Attention(nn.Module):
    """Written as people write it: sizes from the input, heads from an attribute."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        hidden = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
        if mask is not None:
            hidden = hidden & mask[:, None, None, :]
        out = scores.masked_fill(~hidden, -1e9).softmax(-1) @ v
        return self.drop(self.proj(out.transpose(1, 2).reshape(batch, length, -1)))


def assert_right(traced: nn.Module, model: nn.Module, *args: Any) -> None:
    torch.manual_seed(0)
    expected = model(*args)
    model.zero_grad()
    expected.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    torch.manual_seed(0)
    found = traced(*args)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close([p.grad for p in model.parameters() if p.grad is not None], gradients)


def test_one_graph_serves_every_batch_and_length() -> None:
    model = Attention()
    traced = trace(model, example_inputs=(torch.randn(2, 4, 8),))
    for shape in [(2, 4, 8), (2, 2, 8), (5, 4, 8), (1, 1, 8), (8, 8, 8), (3, 7, 8)]:
        assert_right(traced, model, torch.randn(shape))
    assert graphs(traced) == 1


def test_other_structures_and_modes_get_graphs_of_their_own() -> None:
    model = Attention()
    traced = trace(model, example_inputs=(torch.randn(2, 4, 8),))
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[0, 3] = False
    for _ in range(2):
        assert_right(traced, model, torch.randn(2, 4, 8), mask)
        assert graphs(traced) == 2
    assert_right(traced, model, torch.randn(5, 3, 8), torch.ones(5, 3, dtype=torch.bool))
    assert graphs(traced) == 2
    traced.eval(), model.eval()
    assert_right(traced, model, torch.randn(2, 4, 8))
    assert graphs(traced) == 2  # what has a mode is a module kept whole
    with torch.no_grad():
        torch.testing.assert_close(traced(X.view(1, 1, 8)), model(X.view(1, 1, 8)))


def test_what_python_decides_by_a_size_is_decided_anew() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            return x * 2
        for place in range(x.shape[1]):
            x = x + place
        return x * float(x.shape[1]) ** 0.5 + len("a" * x.shape[0])

    model = Forward(forward)
    traced = trace(model, example_inputs=(X,))
    for shape in [(2, 4), (1, 4), (2, 3), (3, 4), (7, 2), (2, 4)]:
        x = torch.randn(shape)
        torch.testing.assert_close(traced(x), model(x))
    assert graphs(traced) > 3


def test_an_attribute_that_changes_is_read_anew() -> None:
    model = Forward(lambda self, x: self.fc(x).view(x.size(0), self.heads, -1).sum(1))
    model.heads = 2
    traced: Any = trace(model, example_inputs=(X,))
    traced.heads = model.heads = 4
    assert_right(traced, model, X)
    assert graphs(traced) == 1


CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], list[tuple[Any, ...]]]] = [
    (
        lambda self, x, y=None: x if y is None else x * y,
        (X,),
        [(torch.randn(3, 4),), (X.double(),), (X, 2.0), (X, X), (X, True), (X,)],
    ),
    (lambda self, x, y: x + y["a"][1], (X, {"a": [1, X]}), [(X, {"a": [2, X]}), (X, {"a": (1, X, 3)})]),
    (lambda self, x, n: x.repeat(n, 1), (X, 2), [(X, 3), (X, 1)]),
    (lambda self, x: x.view(x.numel() // 2, -1) + x.shape[-1], (X,), [(torch.randn(6, 3),), (torch.randn(2, 2, 2),)]),
    (lambda self, x: x[: x.size(0) - 1, None].expand(-1, x.size(-1), -1), (X,), [(torch.randn(5, 3),)]),
    (lambda self, x, **more: x + sum(more.values()), (X,), [(X,)]),
    (lambda self, x: x.new_zeros(x.shape) + torch.arange(x.shape[1]), (X,), [(torch.randn(3, 9),)]),
    (lambda self, x: x if x.shape != (2, 4) else -x, (X,), [(torch.randn(3, 4),)]),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tracer", [trace, trace_module])
@pytest.mark.parametrize("make", [lambda traced: traced, copy.deepcopy])
@pytest.mark.parametrize(("function", "first", "others"), CALLS)
def test_calls_that_differ(function: Any, first: Any, others: Any, make: Any, tracer: Any) -> None:
    model = Forward(function)
    traced = make(tracer(model, example_inputs=first))
    for args in [first, *others, first, *others]:
        torch.testing.assert_close(traced(*args), model(*args))


def test_another_mode() -> None:
    model = Forward(lambda self, x: x * 2 if self.training else x).train()
    traced = trace_module(model, (X,))
    torch.testing.assert_close(traced.eval()(X), X)
    torch.testing.assert_close(traced.train()(X), X * 2)


def test_pickles_run_other_calls_too() -> None:
    model = Attention()
    traced = trace(model, example_inputs=(torch.randn(2, 4, 8),))
    traced(torch.randn(3, 3, 8), torch.ones(3, 3, dtype=torch.bool))
    copied = pickle.loads(pickle.dumps(traced))  # noqa: S301
    for args in [(torch.randn(2, 4, 8),), (torch.randn(3, 5, 8), torch.ones(3, 5, dtype=torch.bool))]:
        torch.manual_seed(1)
        expected = model(*args)
        torch.manual_seed(1)
        torch.testing.assert_close(copied(*args), expected)


def test_what_cannot_be_traced_for_a_call_runs_the_forward(capsys: Any) -> None:
    model = Forward(lambda self, x, by_value=False: -x if by_value and x.sum() > 0 else x)
    traced = trace_module(model, (X,))
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(traced(x, True), -torch.ones(3))
    said = capsys.readouterr().err
    assert said.count("the traced Forward runs its own forward, not a graph, for calls like this") == 1
    assert "asks for the values of a tensor (bool)" in said


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_run_the_forward(capsys: Any) -> None:
    traced = trace_module(Forward(lambda self, x: x * 2.0), (torch.ones(2, 3),))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for _ in range(2):
        torch.testing.assert_close(traced(nested).to_padded_tensor(0.0), 2.0 * nested.to_padded_tensor(0.0))
    assert capsys.readouterr().err.count("it is given a nested tensor") == 1


# ---- questions whose answers are part of the graph


@pytest.mark.parametrize("tracer", [trace_module, trace])
@pytest.mark.parametrize(
    "ask",
    [
        lambda self, x: torch.is_grad_enabled(),
        lambda self, x: is_grad_enabled(),
        lambda self, x: (x * self.scale).requires_grad,
        lambda self, x: (x * self.scale).grad_fn is not None,
    ],
)
def test_the_gradient_mode_is_asked_for(ask: Any, tracer: Any) -> None:
    model = Forward(lambda self, x: self.inner(x) + 1)
    model.inner = Forward(lambda self, x: torch.rand_like(x) * self.scale if ask(self, torch.dropout(x, 0.5, True)) else -x)
    traced = tracer(model, example_inputs=(X,))

    def assert_same() -> None:
        torch.manual_seed(3)
        expected = model(X), torch.rand(1)
        torch.manual_seed(3)
        torch.testing.assert_close((traced(X), torch.rand(1)), expected)

    for _ in range(2):
        assert_same()
        with torch.no_grad():
            assert_same()


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
    torch.testing.assert_close(traced(X), X)


@pytest.mark.parametrize("question", ["is_contiguous", "stride", "storage_offset"])
def test_the_layout_of_an_input_is_asked_for(question: str) -> None:
    model = Forward(lambda self, x: x if getattr(x, question)() in (True, (4, 1), 0) else -x)
    traced = trace_module(model, (X,))
    torch.testing.assert_close(traced(X), X)
    other = torch.randn(4, 3)[:, 1:].t()
    for x in (other, X, other):
        torch.testing.assert_close(traced(x), model(x))


# ---- what the model's own attributes say


def test_attributes_that_change_after_the_trace() -> None:
    model = Forward(lambda self, x: self.inner(x) * self.number * self.box.content["deep"] if self.inner.flag else x)
    model.number, model.box, model.inner = 2.0, Box({"deep": 3.0}), Forward(lambda self, x: torch.relu(x) * self.number)
    model.inner.flag, model.inner.number = True, 1.0
    traced = trace_module(model, (X,))
    for change, back in [
        (lambda: model.box.content.update(deep=4.0), lambda: model.box.content.update(deep=3.0)),
        (lambda: setattr(model.inner, "flag", False), lambda: setattr(model.inner, "flag", True)),
        (lambda: setattr(model.inner, "number", 1), lambda: setattr(model.inner, "number", 1.0)),
        (lambda: (setattr(model, "number", 5.0), setattr(traced, "number", 5.0)), lambda: None),
    ]:
        change()
        torch.testing.assert_close(traced(X), model(X))
        back()
        torch.testing.assert_close(traced(X), model(X))
    model.unread = 1
    traced(X)
    model.number = 7.0
    with pytest.raises(TraceError, match="attribute number is 7.0, traced as 2.0 on the module that was traced"):
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
    torch.testing.assert_close(traced(X), X * 3)


def test_the_mode_of_a_part() -> None:
    model = Forward(lambda self, x: self.fc(self.inner(x)))
    model.inner = Forward(lambda self, x: x * 2 if self.training else self.fc(x))
    traced = trace_module(model, (X,))
    traced.inner.eval()
    torch.testing.assert_close(traced(X), model(X))


def test_copies_have_attributes_of_their_own() -> None:
    model = Forward(lambda self, x: x * self.number * self.plain)
    model.number, model.plain = 2.0, torch.ones(4)
    traced = trace_module(model, (X,))
    copied: Any = copy.deepcopy(traced)
    model.number = copied.note = 5.0
    torch.testing.assert_close(copied(X), X * 2)
    copied.number = 3.0
    torch.testing.assert_close(copied(X), X * 3)
    copied.number, copied.plain = float("2"), torch.zeros(4)
    torch.testing.assert_close(copied(X), X * 0)


# ---- hooks


def test_hooks_and_wrappers_run_around_the_graph_once() -> None:
    seen: list[str] = []
    model = nn.Sequential(Attention(), nn.Linear(8, 8)).eval()
    model[0].register_forward_pre_hook(lambda module, args: seen.append("pre") or (args[0] * 2,))
    handle = model[0].register_forward_hook(lambda module, args, out: seen.append("post") or out + 1)
    model[0].register_full_backward_hook(lambda module, inner, outer: seen.append("backward"))
    x = torch.randn(2, 3, 8, requires_grad=True)
    expected = model(x)
    expected.sum().backward()
    gradient, x.grad = x.grad, None
    sch = create_schedule(model, example_inputs=(x,))
    sch["0"].checkpoint().trace()
    assert sch["0"].mod.graph.find_nodes(op="call_module", target="qkv")
    seen.clear()
    found = sch.mod(x)
    found.sum().backward()
    assert seen == ["pre", "post", "backward"]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(x.grad, gradient)
    handle.remove()
    sch.mod(x)
    assert seen[3:] == ["pre"]
    sch.undo(), sch.undo()
    assert isinstance(model[0], Attention)
    torch.testing.assert_close(model(x), expected - model[1].weight.sum(1))
