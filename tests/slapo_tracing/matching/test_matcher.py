"""Matches follow data flow and constants exactly."""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from slapo_core import ScheduleError
from slapo_tracing import trace_module
from slapo_tracing.graphs import TracedModule
from slapo_tracing.matching import matcher
from slapo_tracing.matching.matcher import find_node, find_subgraph, match_data
from slapo_tracing.matching.patterns import ModulePattern, Pattern, call_module

X = torch.randn(2, 4)


class Net(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        for name in ("fc1", "fc10", "q", "k", "v"):
            self.add_module(name, nn.Linear(4, 4))
        self.norm = nn.LayerNorm(4)
        self.wide = nn.LayerNorm(4, eps=1e-3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def trace(function: Callable[..., Any]) -> TracedModule:
    return trace_module(Net(function), (X,), leaf=lambda path, module: type(module).__module__.startswith("torch.nn"))


def found(function: Callable[..., Any], pattern: Any) -> list[list[str]]:
    return [[node.name for _, node in match] for match in find_subgraph(trace(function), pattern)]


def test_correctness_16_a_name_matches_fully() -> None:
    traced = trace(lambda self, x: self.fc10(self.fc1(x)))
    assert [node.target for _, node in find_node(traced, "fc1")] == ["fc1"]
    assert [node.target for _, node in find_node(traced, r"fc\d+")] == ["fc1", "fc10"]
    assert found(lambda self, x: self.fc10(self.fc1(x)), lambda x: call_module("fc1", x)) == [["fc1"]]


def test_a_node_by_predicate_with_the_path_of_its_module() -> None:
    outer = nn.Sequential(trace(lambda self, x: F.relu(self.fc1(x))))
    assert find_node(outer, lambda node: node.target is F.relu, prefix="a.b") == [
        ("a.b.0", outer[0].graph.find_nodes(op="call_function", target=F.relu)[0])
    ]


SAME: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="none")),
    (lambda x: x + 1, lambda x: torch.add(x, 1)),
    (lambda x: x + 1, lambda x: x.add(1)),
    (lambda x: x + 1, lambda x: 1 + x),
    (lambda x: x * x.sin(), lambda x: torch.mul(torch.sin(x), x)),
    (lambda x: 2 - x, lambda x: torch.sub(torch.sin(x), x) * 0 + (2 - x)),
    (lambda x: x.view(1, -1), lambda x: x.view((1, -1))),
    (lambda x: x.permute(1, 0), lambda x: torch.permute(x, (1, 0))),
    (lambda x: torch.softmax(x, -1), lambda x: F.softmax(x, dim=-1)),
    (lambda x: F.relu(x), lambda x: x.relu()),
    (lambda x: x / 2, lambda x: torch.div(x, 2)),
    (lambda x: x @ x.t(), lambda x: torch.matmul(x, torch.t(x))),
    (lambda x: x.transpose(0, 1), lambda x: torch.transpose(x, dim0=0, dim1=1)),
    (lambda x: x.sum(-1, keepdim=False), lambda x: torch.sum(x, -1)),
    (lambda x: x[:, 1:], lambda x: operator.getitem(x, (slice(None), slice(1, None)))),
    (lambda x: F.layer_norm(x, (4,)), lambda x: F.layer_norm(x, [4], None, None, 1e-5)),
]
DIFFERENT: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh")),
    (lambda x: x + 1, lambda x: x + 2),
    (lambda x: x + 1, lambda x: x + 1.0),
    (lambda x: x - x.sin(), lambda x: x.sin() - x),
    (lambda x: torch.add(x, x, alpha=2), lambda x: x + x),
    (lambda x: x.relu(), lambda x: x.relu_()),
    (lambda x: F.dropout(x, 0.1), lambda x: F.dropout(x, 0.2)),
    (lambda x: F.dropout(x, 0.1, training=True), lambda x: F.dropout(x, 0.1, training=False)),
    (lambda x: x.softmax(-1), lambda x: x.softmax(0)),
    (lambda x: x[:, 1:], lambda x: x[:, :1]),
    (lambda x: x.sin().cos(), lambda x: x.cos().sin()),
]


@pytest.mark.parametrize(("wanted", "written"), SAME)
def test_spellings_of_one_operation(wanted: Callable[..., Any], written: Callable[..., Any]) -> None:
    assert len(found(lambda self, x: written(self.fc1(x)), wanted)) == 1


@pytest.mark.parametrize(("wanted", "written"), DIFFERENT)
def test_correctness_16_other_operations_and_constants(wanted: Callable[..., Any], written: Callable[..., Any]) -> None:
    assert found(lambda self, x: written(self.fc1(x)), wanted) == []


def test_correctness_16_data_flow_counts_and_not_order() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        a, b = x.sin(), x.cos()
        return a * b.exp(), b * a.exp(), a * a.exp()

    assert found(forward, lambda x: x * x.exp()) == [["exp_3", "mul_2"]] or len(found(forward, lambda x: x * x.exp())) == 1
    assert len(found(forward, lambda x, y: x * y.exp())) == 3


def test_correctness_16_occurrences_do_not_overlap() -> None:
    assert found(lambda self, x: x.sin().sin().sin().sin().sin(), lambda x: x.sin().sin()) == [
        ["sin", "sin_1"],
        ["sin_2", "sin_3"],
    ]


def test_constants_given_to_the_pattern_are_its_inputs() -> None:
    traced = trace(lambda self, x: F.dropout(self.fc1(x), 0.25, True))
    (match,) = find_subgraph(traced, lambda x, p: F.dropout(x, p, True))
    assert match.inputs[1] == 0.25


def test_parallel_branches() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        y = self.fc1(x)
        return self.q(x), self.q(y), self.k(y).relu(), self.v(y)

    def pattern(x: torch.Tensor) -> Any:
        return call_module("q", x), F.relu(call_module("[kv]", x)), call_module("[kv]", x)

    (match,) = find_subgraph(trace(forward), pattern)
    assert [node.name for node in match.outputs] == ["q_1", "relu", "v"]
    assert [node.name for _, node in match] == ["q_1", "k", "relu", "v"]


def test_two_branches_are_two_nodes() -> None:
    assert found(lambda self, x: x.sin(), lambda x: (x.sin(), x.sin())) == []


class Mlp(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.up = ModulePattern(r"fc\d+")
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(F.gelu(self.up(x)))


def test_pattern_with_modules() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.norm(F.gelu(self.fc10(x))), self.wide(F.gelu(self.fc1(x)))

    assert found(forward, Mlp()) == [["fc10", "gelu", "norm"]]
    assert found(forward, ModulePattern("fc.*")) == [["fc10"], ["fc1"]]


class Inner(Pattern):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def hooked() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_forward_hook(lambda module, args, output: output * 2)
    return module


@pytest.mark.parametrize(
    ("wanted", "other"),
    [
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())),
        (nn.AvgPool1d(2, count_include_pad=True), nn.AvgPool1d(2, count_include_pad=False)),
        (nn.TransformerEncoderLayer(4, 2, activation="relu"), nn.TransformerEncoderLayer(4, 2, activation="gelu")),
        (nn.TransformerEncoderLayer(4, 2), nn.TransformerEncoderLayer(4, 2, norm_first=True)),
        (nn.Linear(4, 4), hooked()),
        (nn.Linear(4, 4), nn.Linear(4, 4, bias=False)),
    ],
    ids=["inside", "option", "activation", "order", "hook", "bias"],
)
def test_a_module_of_a_pattern_is_all_of_its_settings(wanted: nn.Module, other: nn.Module) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same, self.other = copy.deepcopy(wanted), other

        def forward(self, x: torch.Tensor) -> Any:
            return self.same(x), self.other(x)

    traced = trace_module(Holder(), torch.randn(2, 3, 4), leaf=lambda path, module: path in ("same", "other"))
    assert [[node.name for _, node in match] for match in find_subgraph(traced, Inner(wanted))] == [["same"]]


class Twice(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.mlp(x))


def test_a_pattern_may_be_made_of_patterns() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.norm(F.gelu(self.fc1(self.norm(F.gelu(self.fc10(x))))))

    assert found(forward, Twice()) == [["fc10", "gelu", "norm", "fc1", "gelu_1", "norm_1"]]


def test_arguments_of_module_calls() -> None:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor, factor: float = 1.0, shift: Any = None) -> torch.Tensor:
            return x * factor

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale(x, shift=None) + self.scale(x=x, factor=2.0)

    traced = trace_module(Outer(), (X,), leaf=lambda path, module: True)
    for pattern, count in [
        (lambda x: call_module("scale", x), 1),
        (lambda x: call_module("scale", x, 2.0), 1),
        (lambda x: call_module("scale", x, factor=1.0), 1),
        (lambda x: call_module("scale", x, 3.0), 0),
        (lambda x, f: call_module("scale", x, f), 2),
        (lambda x, f: call_module("scale", x, f, shift=1.0), 0),
    ]:
        assert len(find_subgraph(traced, pattern)) == count


def test_patterns_that_are_none() -> None:
    traced = trace(lambda self, x: x.sin())
    with pytest.raises(ScheduleError, match="returns results of operations"):
        find_subgraph(traced, lambda x: x)
    with pytest.raises(ScheduleError, match="the pattern cannot be traced: TraceError"):
        find_subgraph(traced, lambda x: x if x else x.sin())
    with pytest.raises(ScheduleError, match=r"the pattern cannot be traced: .*call_module\(name, ...\) for a module"):
        find_subgraph(traced, lambda x: ModulePattern("dropout")(x).sin())
    for wrong in (lambda: find_node(traced, "("), lambda: find_subgraph(traced, lambda x: call_module("(", x))):
        with pytest.raises(ScheduleError, match=r"find: '\(' is not a regular expression: missing \)"):
            wrong()
    with pytest.raises(TypeError, match="a function or a Pattern, not int"):
        find_subgraph(traced, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="for pattern functions"):
        call_module("fc", 3)


def test_many_commutative_operands_are_no_explosion() -> None:
    def pattern(a: Any, b: Any, c: Any, d: Any) -> Any:
        return (a + b) * (c + d)

    assert len(found(lambda self, x: (x.sin() + x.cos()) * (x.exp() + x.tan()), pattern)) == 1


def test_an_argument_of_a_pattern_may_be_what_a_call_leaves_out() -> None:
    def pattern(x: Any, p: Any, training: Any) -> Any:
        return F.dropout(x, p, training)

    for call in (lambda self, x: F.dropout(x), lambda self, x: F.dropout(x, 0.5, training=True)):
        (match,) = find_subgraph(trace(call), pattern)
        assert match.inputs[1:] == [0.5, True]
    graph = trace(lambda self, x: F.scaled_dot_product_attention(x, x, x, attn_mask=None))
    assert len(find_subgraph(graph, lambda x, mask: F.scaled_dot_product_attention(x, x, x, attn_mask=mask))) == 1
    assert find_subgraph(graph, lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)) == []


def test_handles_are_pairs_of_path_and_node() -> None:
    ((path, node),) = find_node(trace(lambda self, x: self.fc1(x)), "fc1")
    assert path == ""
    assert isinstance(node, fx.Node)


def test_matches_can_be_written_down_and_found_again() -> None:
    class Holder:
        root_module = trace(lambda self, x: F.dropout(self.fc1(x), 0.25, True) - x)

    holder: Any = Holder()
    (match,) = find_subgraph(holder.root_module, lambda y, p, x: F.dropout(x, p, True) - y)
    again = matcher.match(holder, json.loads(json.dumps(match_data(match))))
    assert again == match
    assert " at 0x" not in json.dumps(match_data(match))  # it is found in other processes too
    assert (again.inputs, again.outputs) == (match.inputs, match.outputs)  # type: ignore[attr-defined]
    assert matcher.match(holder, match_data(list(match))) == list(match)
    holder.root_module = trace(lambda self, x: F.dropout(self.fc1(x), 0.25, True) + x)
    with pytest.raises(
        ScheduleError, match="has no node 'sub' that calls sub; trace the module as it was when the match was found"
    ):
        matcher.match(holder, match_data(match))
