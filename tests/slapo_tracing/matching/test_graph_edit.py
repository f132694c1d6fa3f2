"""Edits of a traced graph: what is allowed, what is refused, and how it is taken back."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slapo_core import Schedule, ScheduleError, TraceError, Transaction, create_schedule
from slapo_tracing import trace_module
from slapo_tracing.editing import graph_edit
from slapo_tracing.graphs import TracedModule
from slapo_tracing.matching import Match
from slapo_tracing.matching.matcher import find_node, find_subgraph
from slapo_tracing.matching.patterns import call_module
from slapo_tracing.nodes import write_mode_nodes

X = torch.randn(2, 4)


class Edits:
    """The part of a schedule that an edit needs."""

    path = ""

    def __init__(self, root: nn.Module) -> None:
        self.root_module = root
        self.transaction = Transaction()
        self.touch, self.on_undo, self.undo = self.transaction.touch, self.transaction.on_undo, self.transaction.rollback


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).relu()
        k = self.k(x)
        v = self.v(x)
        return x + self.out(F.gelu((q @ k.t()).softmax(-1) @ v) * 2)


class Net(nn.Module):
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Fused(nn.Module):
    """Three linears of one input."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(part(x) for part in self.parts)


def traced(model: nn.Module) -> TracedModule:
    return trace_module(model, (X,), leaf=lambda path, module: isinstance(module, nn.Linear))


def qkv(x: torch.Tensor) -> Any:
    return call_module(r".*\.q", x), call_module(r".*\.k", x), call_module(r".*\.v", x)


def scaled_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x) * 2


def modules_of(gm: TracedModule, match: Match) -> list[nn.Module]:
    return [gm.get_submodule(str(node.target)) for _, node in match]


def test_several_outputs_and_undo() -> None:
    model = Net()
    gm = traced(model)
    edits, before, state = Edits(gm), str(gm.graph), list(gm.state_dict())
    for match in find_subgraph(gm, qkv):
        path = graph_edit.replace_subgraph(edits, match, Fused(*modules_of(gm, match)), "qkv")
        assert path.endswith(".qkv")
    torch.testing.assert_close(gm(X), model(X))
    assert "q" not in dict(gm.blocks[0].named_children())
    assert "q" in dict(model.blocks[0].named_children())
    gm(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    gm.graph.lint()
    edits.undo()
    assert str(gm.graph) == before
    assert list(gm.state_dict()) == state
    torch.testing.assert_close(gm(X), model(X))


def test_handles_survive_edits_and_undo() -> None:
    model = Net(3)
    gm = traced(model)
    edits = Edits(gm)
    first, second, third = find_subgraph(gm, scaled_gelu)
    mine = Function(lambda x: F.gelu(x) * 2)
    graph_edit.replace_subgraph(edits, second, mine)
    edits.undo()
    for match in (second, first, third):
        graph_edit.replace_subgraph(edits, match, mine)
        torch.testing.assert_close(gm(X), model(X))
    with pytest.raises(ScheduleError, match="node 'gelu' is no longer in the graph; find it again"):
        graph_edit.replace_subgraph(edits, first, mine)


def test_matches_next_to_each_other() -> None:
    model = Function(lambda x: x.sin().cos().sin().cos().sin().cos())
    gm = trace_module(model, (X,))
    edits = Edits(gm)
    for match in find_subgraph(gm, lambda x: x.sin().cos()):
        graph_edit.replace_subgraph(edits, match, Function(lambda x: x.sin().cos()), "wave")
    assert [node.target for node in gm.graph.find_nodes(op="call_module")] == ["wave", "wave_1", "wave_2"]
    torch.testing.assert_close(gm(X), model(X))


def test_inputs_come_in_the_order_of_the_pattern() -> None:
    model = Function(lambda x: x.sin() - x.cos() * 3)
    gm = trace_module(model, (X,))
    (match,) = find_subgraph(gm, lambda b, factor, a: a - b * factor)
    graph_edit.replace_subgraph(Edits(gm), match, Function(lambda b, factor, a: a - b * factor))
    torch.testing.assert_close(gm(X), model(X))


def test_without_a_pattern_inputs_come_in_the_order_of_use() -> None:
    model = Function(lambda x: (x.sin() - x.cos()).exp())
    gm = trace_module(model, (X,))
    nodes = find_node(gm, lambda node: node.target in ("sub", "exp"))
    graph_edit.replace_subgraph(Edits(gm), nodes, lambda a, b: (a - b).exp(), "sub_exp")
    assert "sub_exp" in str(gm.graph)
    torch.testing.assert_close(gm(X), model(X))


def test_default_arguments_are_respected() -> None:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor, factor: float = 2.0, *, shift: float = 0.0) -> torch.Tensor:
            return F.gelu(x) * factor + shift

    gm = trace_module(Function(lambda x: F.gelu(x) * 2), (X,))
    (match,) = find_subgraph(gm, scaled_gelu)
    graph_edit.replace_subgraph(Edits(gm), match, Scale())
    torch.testing.assert_close(gm(X), F.gelu(X) * 2)


def test_a_call_that_does_not_fit() -> None:
    gm = trace_module(Function(lambda x: x.sin() + x.cos()), (X,))
    (match,) = find_subgraph(gm, lambda x, y: x + y)
    before = str(gm.graph)
    for new, what in [
        (nn.Linear(4, 4), "does not take 2 inputs"),
        (lambda a, b, c: a, "missing a required argument: 'c'"),
    ]:
        with pytest.raises(ScheduleError, match=what):
            graph_edit.replace_subgraph(Edits(gm), match, new)
    assert str(gm.graph) == before


@pytest.mark.parametrize(
    ("function", "pattern", "what"),
    [
        (
            lambda x: (y := x.sin()) + y.cos() + y,
            lambda x: x.sin().cos(),
            "the value 'sin' inside the subgraph is also used outside, by 'add(_1)?'",
        ),
        (lambda x: (y := x.sin(), y.cos() * y)[1], lambda x: (x.sin(), x.cos() * x), None),
        (
            lambda x: ((y := x.sin()), y.exp().cos())[1],
            lambda x, z: (x.sin(), z.cos()),
            "a result of the subgraph comes back into it|made from a result",
        ),
    ],
)
def test_what_is_no_call(function: Any, pattern: Any, what: str | None) -> None:
    gm = trace_module(Function(function), (X,))
    for match in find_subgraph(gm, pattern):
        with pytest.raises(ScheduleError, match=what or "."):
            graph_edit.replace_subgraph(Edits(gm), match, Function(lambda *args: args))


def test_nodes_that_must_come_later_are_moved() -> None:
    model = Function(lambda x: ((y := x.sin()) * 2, x.exp().cos() + y)[1] + y.tan())
    gm = trace_module(model, (X,))
    handles = find_node(gm, lambda node: node.target in ("sin", "cos"))
    edits, before = Edits(gm), str(gm.graph)
    graph_edit.replace_subgraph(edits, handles, lambda x, e: (x.sin(), e.cos()))
    gm.graph.lint()
    torch.testing.assert_close(gm(X), model(X))
    edits.undo()
    assert str(gm.graph) == before


def test_not_across_a_region() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.sin()
        return y.cos()

    gm = trace_module(Function(forward), (X,))
    (match,) = find_subgraph(gm, lambda x: x.sin().cos())
    with pytest.raises(ScheduleError, match="partly inside a no_grad or autocast region"):
        graph_edit.replace_subgraph(Edits(gm), match, Function(lambda x: x))


def test_shared_modules_are_kept_while_somebody_calls_them() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.fc(x).relu()).sin()

    model = Twice()
    gm = traced(model)
    first, second = find_node(gm, "fc")
    edits = Edits(gm)
    graph_edit.replace_subgraph(edits, [first], nn.Identity())
    assert gm.fc is model.fc
    graph_edit.replace_subgraph(edits, [second], nn.Identity())
    assert "fc" not in dict(gm.named_children())
    edits.undo()
    torch.testing.assert_close(gm(X), model(X))


def test_extract_and_put_back() -> None:
    model = Net()
    gm = traced(model)
    edits = Edits(gm)
    for match in find_subgraph(gm, lambda a, b: call_module(r".*\.out", F.gelu(a) * b)):
        part = graph_edit.extract(gm, match)
        assert sorted(name for name, _ in part.named_parameters()) == ["out.bias", "out.weight"]
        path = graph_edit.replace_subgraph(edits, match, part, "tail")
        assert gm.get_submodule(path) is part
    torch.testing.assert_close(gm(X), model(X))
    assert {id(p) for p in gm.parameters()} == {id(p) for p in model.parameters()}


def test_replace_primitive_and_undo_of_a_schedule() -> None:
    model = Net()
    expected = model(X)
    sch = create_schedule(model, example_inputs=(X,))
    sch.trace(flatten=True)
    matches = sch.find(qkv)
    for match in matches:
        sch.replace(Fused(*modules_of(sch.mod, match)), match, name="qkv")  # type: ignore[arg-type]
        torch.testing.assert_close(sch.mod(X), expected)
    assert sch["blocks.1.qkv"].mod.parts is not None
    for _ in matches:
        sch.undo()
    sch.replace(Fused(*modules_of(sch.mod, matches[1])), matches[1])  # type: ignore[arg-type]
    torch.testing.assert_close(sch.mod(X), expected)


def test_a_failing_step_restores_the_graph() -> None:
    model = Net()
    sch: Schedule = create_schedule(model, example_inputs=(X,))
    sch.trace(flatten=True)
    before = str(sch.mod.graph)
    matches = sch.find(scaled_gelu)
    with pytest.raises(ScheduleError):
        sch.replace(nn.Bilinear(4, 4, 4), matches)
    assert str(sch.mod.graph) == before
    torch.testing.assert_close(sch.mod(X), model(X))


class Chunks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return a.sigmoid() * b


def chunked_gate(h: torch.Tensor) -> torch.Tensor:
    parts = h.chunk(2, -1)
    return parts[0].sigmoid() * parts[1]


def test_undo_of_a_subgraph_with_getitem() -> None:
    model = Chunks()
    sch: Schedule = create_schedule(model, example_inputs=(X,))
    sch.trace(flatten=True)
    before = str(sch.mod.graph)
    sch.replace(chunked_gate, sch.find(chunked_gate)[0])
    torch.testing.assert_close(sch.mod(X), model(X))
    sch.undo()
    assert str(sch.mod.graph) == before
    torch.testing.assert_close(sch.mod(X), model(X))


def half_without_gradient(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    with torch.no_grad():
        z = y * 2
    return x.exp().cos() + y + z


def gradient(function: Callable[..., Any]) -> Any:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)


def test_nodes_are_moved_and_put_back_across_the_edge_of_a_region() -> None:
    gm = trace_module(Function(half_without_gradient), (X,))
    wanted = gradient(half_without_gradient)
    edits = Edits(gm)
    for _ in range(2):
        found = find_node(gm, lambda node: node.target in ("sin", "cos"))
        graph_edit.replace_subgraph(edits, found, lambda x, e: (x.sin(), e.cos()))
        torch.testing.assert_close(gradient(gm), wanted)
        edits.undo()
        torch.testing.assert_close(gradient(gm), wanted)


def test_a_call_of_several_outputs_stays_in_its_region() -> None:
    def forward(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y, z = x.sin(), x.cos()
        return x + y * z

    gm = trace_module(Function(forward), (X,))
    (match,) = find_subgraph(gm, lambda x: (x.sin(), x.cos()))
    graph_edit.replace_subgraph(Edits(gm), match, lambda x: (x.sin(), x.cos()))
    write_mode_nodes(gm.graph)  # as everybody does who copies the nodes
    torch.testing.assert_close(gradient(gm), gradient(forward))


def test_not_across_a_change_in_place() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        y = x.sin()
        x.add_(1)
        return y.cos() + x

    gm = trace_module(Function(forward), (X,))
    (match,) = find_subgraph(gm, lambda x: x.sin().cos())
    with pytest.raises(ScheduleError, match="an operation in place keeps the subgraph from being one call"):
        graph_edit.replace_subgraph(Edits(gm), match, lambda x: x.sin().cos())
    torch.testing.assert_close(gm(X), forward(X))


def test_a_change_in_place_inside_goes_along() -> None:
    gm = trace_module(Function(lambda x: (x * 2).relu_() + 1), (X,))
    (match,) = find_subgraph(gm, lambda x: (x * 2).relu_())
    graph_edit.replace_subgraph(Edits(gm), match, lambda x: (x * 2).relu_())
    torch.testing.assert_close(gm(X), (X * 2).relu() + 1)


def test_an_input_that_the_subgraph_itself_makes() -> None:
    gm = trace_module(Function(lambda x: x.sin().cos()), (X,))
    (match,) = find_subgraph(gm, lambda x, z: (x.sin(), z.cos()))
    before = str(gm.graph)
    with pytest.raises(ScheduleError, match="the input 'sin' is made from a result of the subgraph"):
        graph_edit.replace_subgraph(Edits(gm), match, lambda x, z: (x.sin(), z.cos()))
    assert str(gm.graph) == before


def test_undo_at_the_very_beginning_of_a_graph_that_another_undo_has_made_anew() -> None:
    class Alone(nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.ones(2).exp()

    gm = trace_module(Alone(), ())
    edits, before = Edits(gm), str(gm.graph)
    graph_edit.replace_subgraph(edits, find_node(gm, lambda node: node.op == "call_function"), lambda: torch.ones(2))
    other = Transaction()
    other.touch_tree(gm)
    other.rollback()
    edits.undo()
    assert str(gm.graph) == before
    torch.testing.assert_close(gm(), torch.ones(2).exp())


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(self.a(x) + self.b(x), 0.5, self.training)


def twice_dropped(x: torch.Tensor, p: float, on: bool) -> torch.Tensor:
    return torch.nn.functional.dropout(x, p, on)


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, dropout_p=0.0 if self.training else 0.0) + x


class Core(nn.Module):
    def forward(self, q: torch.Tensor, mask: torch.Tensor | None, p: float) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=p) * 2


def test_an_argument_of_a_pattern_may_be_none_in_one_call_and_a_tensor_in_another() -> None:
    x, mask = torch.randn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril()
    for first in ((x,), (x, mask)):
        sch = create_schedule(Masked(), example_inputs=first)
        sch.trace()
        sch.replace(Core(), sch.find(lambda q, m, p: F.scaled_dot_product_attention(q, q, q, attn_mask=m, dropout_p=p)))
        for args in ((x,), (x, mask), (x[:, :1],)):
            given = args[1] if len(args) > 1 else None
            torch.testing.assert_close(sch.mod(*args), Core()(args[0], given, 0.0) + args[0])


def test_a_constant_that_a_function_is_given_is_not_kept_for_another_mode() -> None:
    sch = create_schedule(Dropped(), example_inputs=(torch.ones(2, 4),))
    dropout = torch.nn.functional.dropout
    sch.replace(twice_dropped, lambda x, p, on: dropout(x, p, on))
    sch.mod(torch.ones(2, 4))
    assert (sch.mod.eval()(torch.ones(2, 4)) != 0).all()
    forgotten = pickle.loads(pickle.dumps(sch.mod.train()))  # noqa: S301  a pattern may be any function, and stays behind
    with pytest.raises(TraceError, match="computes something else in this call"):
        forgotten.eval()(torch.ones(2, 4))


def test_one_result_in_the_place_of_two_is_refused() -> None:
    sch = create_schedule(Dropped(), example_inputs=(torch.ones(2, 4),))
    sch.trace()
    sch.replace(lambda x: x * 2, sch.find("a|b"))
    with pytest.raises(ScheduleError, match="returns a Tensor, but the subgraph that it replaced has 2 outputs"):
        sch.mod(torch.ones(2, 4))
    assert "expect_outputs" in str(sch.mod)
