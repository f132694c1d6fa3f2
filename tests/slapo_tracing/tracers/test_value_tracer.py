"""The value tracer on small modules, one behaviour each."""

from __future__ import annotations

import functools
import operator
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slapo_core import TraceError
from slapo_tracing import trace_module
from slapo_tracing.graphs import TracedModule
from slapo_tracing.nodes import wrap_forward
from tests.slapo_tracing.comparison import assert_same, check

X = torch.randn(2, 4)


class Forward(nn.Module):
    """A module with a few weights whose forward is a given function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.fc = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, y: Any = None) -> Any:
        return self.function(self, x) if y is None else self.function(self, x, y)


def is_linear(path: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def targets(traced: torch.fx.GraphModule, op: str = "call_function") -> list[str]:
    return [getattr(node.target, "__name__", str(node.target)) for node in traced.graph.nodes if node.op == op]


# ---- outputs


Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    value: torch.Tensor
    note: str
    parts: list[torch.Tensor]


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content


@pytest.mark.parametrize(
    "build",
    [
        lambda a, b: a,
        lambda a, b: (a, None, b, 3),
        lambda a, b: {"a": a, "more": {"b": [b, "text"]}},
        lambda a, b: Pair(a, (b,)),
        lambda a, b: Record(a, "note", [b, a]),
        lambda a, b: Box({"deep": (a, Box(b))}),
    ],
)
def test_outputs_of_any_structure(build: Any) -> None:
    check(Forward(lambda self, x: build(self.fc(x), x * 2)), X)


def test_sizes_come_out_as_sizes() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor, size: torch.Size) -> torch.Tensor:
            return x * size.numel()

    model = Forward(lambda self, x: (self.counts(x.view(x.shape), x.shape), x.shape, {"more": [x.size()]}))
    model.counts = Counts()
    out = check(model, X, leaf=lambda path, module: path == "counts")(X)
    assert (type(out[1]), type(out[2]["more"][0])) == (torch.Size, torch.Size)


def test_the_same_tensor_given_twice_stays_two_inputs() -> None:
    model = Forward(lambda self, x, y: self.fc(x) - self.fc2(y))
    traced = trace_module(model, (X, X))
    assert_same(model, traced, {"x": X, "y": torch.randn(2, 4)})


@pytest.mark.parametrize("y", [{"a": X, "b": [X + 1]}, [X, (X * 2, None)], Box(X)])
def test_inputs_of_any_structure(y: Any) -> None:
    def forward(self: Any, x: torch.Tensor, y: Any) -> torch.Tensor:
        inside = y.content if isinstance(y, Box) else y["b"][0] if isinstance(y, dict) else y[1][0]
        return self.fc(x + inside)

    traced = check(Forward(forward), X, y)
    assert [node.target for node in traced.graph.find_nodes(op="placeholder")] == ["x", "y"]


# ---- what is called


def test_leaf_calls_keep_their_arguments() -> None:
    class Inner(nn.Module):
        def forward(self, pair: Any, *rest: Any, key: Any, **more: Any) -> Any:
            return {"out": pair[0] * pair[1]["w"] + rest[0] + key + more["other"][0], "same": pair[0]}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> Any:
            out = self.inner((x, {"w": x + 1}), 2.0, key=x, other=(x, None))
            return out["out"] + out["same"]

    traced = check(Outer(), X, leaf=lambda path, module: path == "inner")
    (call,) = traced.graph.find_nodes(op="call_module")
    assert call.args[1] == 2.0
    assert set(call.kwargs) == {"key", "other"}


def test_a_module_called_twice() -> None:
    traced = check(Forward(lambda self, x: self.fc(self.fc(x).relu())), X, leaf=is_linear)
    assert targets(traced, "call_module") == ["fc", "fc"]


def test_a_leaf_that_returns_its_input_stays_in_the_data_flow() -> None:
    model = Forward(lambda self, x: self.identity(x.sin()) + 1)
    model.identity = nn.Identity()
    traced = check(model, X, leaf=lambda path, module: path == "identity")
    (call,) = traced.graph.find_nodes(op="call_module")
    assert len(call.users) == 1


def test_weights_used_directly_are_named_by_path() -> None:
    traced = check(Forward(lambda self, x: x * self.scale + self.table + F.linear(x, self.fc.weight)), X)
    assert targets(traced, "get_attr") == ["scale", "table", "fc.weight"]


def test_hooks_make_a_module_a_leaf() -> None:
    model = Forward(lambda self, x: self.fc(self.fc2(x)))
    model.fc.register_forward_hook(lambda module, args, out: out * 2)
    wrap_forward(model.fc2, _double)
    traced = check(model, X)
    assert targets(traced, "call_module") == ["fc2", "fc"]


def _double(call: Any, *args: Any) -> Any:
    return call(*args) * 2


def test_a_module_that_is_no_submodule_is_recorded_with_its_own_weights() -> None:
    hidden = nn.Linear(4, 4)
    model = Forward(lambda self, x: hidden(x))
    traced = trace_module(model, (X,))
    torch.testing.assert_close(traced(X), model(X))
    traced(X).sum().backward()
    assert hidden.weight.grad is not None


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, power: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**power

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 7 * grad, None


kept_cube = Cube.apply


@pytest.mark.parametrize("cube", [lambda *args: Cube.apply(*args), kept_cube])
def test_autograd_function_keeps_its_backward(cube: Any) -> None:
    traced = check(Forward(lambda self, x: cube(self.fc(x), 3)), X)
    assert "apply" in targets(traced)


def test_decorated_and_odd_functions() -> None:
    @functools.wraps(torch.sin)
    def wrapped(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.max_pool1d(x, 2).repeat(1, 2)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = functools.partial(F.softmax, dim=-1)(wrapped(self.fc(x)))
        y = torch.ops.aten.mul.Tensor(y, y) + torch.ops.aten.sin(y)
        return torch.einsum("ij,kj->ik", y, y) + F.interpolate(y[None], 2)[0]

    check(Forward(forward), X)


def test_numpy_and_odd_numbers_in_arguments() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        index = numpy.array([1, 0])
        y = x * numpy.float32(1.5) + numpy.float64(2.0) * x + torch.tensor(numpy.ones(4, dtype="float32"))
        return self.fc(y[index].clamp(min=float("-inf"), max=numpy.float64("inf")))

    check(Forward(forward), X)


def test_dropout_follows_the_seed() -> None:
    check(Forward(lambda self, x: F.dropout(self.fc(x), 0.5, training=self.training)).train(), torch.randn(32, 4))


# ---- Python values


def test_shapes_and_flags_stay_python() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        batch, width = x.shape
        y = x.view(batch * width // 2, -1) if x.is_floating_point() and len(x) == 2 else x
        return y.reshape(x.size(0), x.shape[-1]) * x.numel()

    assert targets(check(Forward(forward), X), "call_method") == ["view", "reshape", "mul"]


def test_values_of_constants_are_known() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(3).cumsum(0)
        steps[1] = 5
        for step in steps.tolist():
            x = x + step
        return x if bool((steps > 4).any()) else -x

    check(Forward(forward), X)


def test_layer_drop_that_is_off() -> None:
    check(Forward(lambda self, x: x if torch.rand([]) < 0.0 else self.fc(x)), X)


def test_constants_leave_no_fake_tensor() -> None:
    outside = torch.full((4,), 3.0)
    traced = check(Forward(lambda self, x: x + torch.tensor([1.0, 2, 3, 4]) + outside), X)
    assert traced._tensor_constant0 is outside
    assert "_tensor_constant0" not in traced.state_dict()
    assert not any(type(tensor).__name__ == "FakeTensor" for tensor in [*traced.buffers(), *traced.parameters()])


# ---- changes in place


def test_changes_in_place_are_in_the_data_flow() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        y[0] = 1.0
        y += x
        y[:, 1:].mul_(2)
        with torch.no_grad():
            torch.add(x, 1, out=self.table.new_empty(2, 4))
        y.masked_fill_(x > 0, 0.5)
        return F.relu(y, inplace=True)

    check(Forward(forward), X)


def test_batch_norm_updates_its_buffers_when_run_and_not_when_traced() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x)

    for leaf in (True, False):
        check(Net(), X, leaf=lambda path, module: leaf)  # noqa: B023


def test_rnn() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 3, num_layers=2, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            out, (h, c) = self.rnn(x)
            return out.sum() + h + c

    for leaf in (True, False):
        model = Net()
        trace_module(model, (X[None],), leaf=lambda path, module: leaf)  # noqa: B023
        assert all(map(operator.is_, model.rnn._flat_weights, model.rnn.parameters()))
        check(model, X[None], leaf=lambda path, module: leaf)  # noqa: B023


def test_an_attribute_of_a_tensor_is_set() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.requires_grad = True
        return y

    check(Forward(forward), X)


def test_an_inner_object_is_changed_and_then_another() -> None:
    def forward(self: Any, x: torch.Tensor, box: Box) -> torch.Tensor:
        inner = self.keep(box).content
        inner.content, box.content = x * 2, Box(x + 1)
        return self.keep(box).content.content + inner.content

    model = Forward(forward)
    model.keep = nn.Identity()
    traced = trace_module(model, (X, Box(Box(X))), leaf=lambda path, module: path == "keep")
    torch.testing.assert_close(traced(X, Box(Box(X))), model(X, Box(Box(X))))
    given = Box(Box(X))
    traced(X, given)
    torch.testing.assert_close(given.content.content, X + 1)


# ---- gradient mode and autocast


def test_no_grad_regions() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        with torch.no_grad():
            table = self.fc(x)
            with torch.enable_grad():
                inner = self.fc2(x)
            table = table + inner
        return table * self.scale + inner, table

    model = Forward(forward)
    traced = check(model, X)
    states = {node.meta["regions"] for node in traced.graph.nodes if node.op == "call_function" and node.target is F.linear}
    assert states == {(("grad", False),), (("grad", True),)}
    with torch.no_grad():
        assert [out.requires_grad for out in traced(X)] == [out.requires_grad for out in model(X)] == [False, False]
        assert not torch.is_grad_enabled()


def test_gradients_on_whatever_the_caller_does() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            with torch.enable_grad(), torch.no_grad():
                fixed = self.fc2(x)
            inner = self.fc(x)
        return inner, self.fc(x) + fixed

    model = Forward(forward)
    traced = check(model, X)
    with torch.no_grad():
        assert [out.requires_grad for out in traced(X)] == [out.requires_grad for out in model(X)] == [True, False]
    with torch.inference_mode():
        for found, expected in zip(traced(X), model(X), strict=True):
            torch.testing.assert_close(found, expected)


def test_an_error_inside_a_region_restores_the_mode() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x @ x.T @ self.fc(x)

    traced = TracedModule(Forward(forward), trace_module(Forward(forward), (X,)).graph)  # runs for any input
    with pytest.raises(RuntimeError):
        traced(x=torch.randn(3, 5))
    assert torch.is_grad_enabled()


def test_autocast_regions() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.fc(x)
            with torch.autocast("cpu", enabled=False):
                z = self.fc2(y.float())
        return y, z, self.fc(x)

    check(Forward(forward), X)
    check(Forward(forward), X, leaf=is_linear)


def test_an_autocast_region_sees_weights_that_have_changed() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.fc(x)

    model = Forward(forward)
    traced = check(model, X)
    before = traced(X)
    with torch.no_grad():
        model.fc.weight += 1
    assert not torch.equal(traced(X), before)


def test_another_autocast_around_the_call() -> None:
    model = Forward(lambda self, x: self.fc(x).float() if torch.is_autocast_enabled("cpu") else self.fc(x))
    with torch.autocast("cpu", torch.bfloat16):
        traced = trace_module(model, (X,))
        torch.testing.assert_close(traced(X), model(X))
    torch.testing.assert_close(traced(X), model(X))


# ---- real tensors where fake ones cannot follow


class Routed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x[:, 0] > 0).nonzero().flatten()
        return x.index_add(0, rows, x[rows]) if len(rows) and bool(x.max() > 0) else x


def test_a_leaf_may_look_at_values() -> None:
    model = Forward(lambda self, x: self.routed(self.fc(x)) * 2)
    model.routed = Routed()
    traced = check(model, X, leaf=lambda path, module: path == "routed")
    assert_same(model, traced, {"x": torch.randn(2, 4)})
    with pytest.raises(TraceError, match=r"weights are on the meta device.*test_value_tracer.py:\d+"):
        trace_module(model.to("meta"), (X,), leaf=lambda path, module: path == "routed")


def test_a_shape_that_depends_on_data_is_checked() -> None:
    model = Forward(lambda self, x: self.fc(x)[x[:, 0] > 0].sum(0) if x[x > 0].numel() > 1 else x)
    x = torch.tensor([[1.0, -1, 2, 3], [-1, 1, 1, 1]])
    traced = check(model, x)
    assert_same(model, traced, {"x": x.flip(0, 1)})
    torch.testing.assert_close(traced(-x.abs()), model(-x.abs()))


def test_as_many_parts_as_the_data_says() -> None:
    model = Forward(lambda self, x: sum(self.fc(x)[x[:, 0] > 0].unbind(0)))
    traced = check(model, X.abs())
    other = torch.stack([X[0].abs(), -X[1].abs()])
    torch.testing.assert_close(traced(other), model(other))


def test_inputs_and_weights_are_not_touched() -> None:
    model = Forward(lambda self, x: self.routed(x.mul_(2)) + self.table.add_(1))
    model.routed = Routed()
    x = X.clone()
    trace_module(model, (x,), leaf=lambda path, module: path == "routed")
    assert torch.equal(x, X)
    assert torch.equal(model.table, torch.arange(4.0))
