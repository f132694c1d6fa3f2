"""The fewest bytes cross, and what is run again behind a boundary gives the same numbers and gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from slapo_core import build_program
from slapo_pipeline.assignment.min_cut import MinimumCrossing
from slapo_pipeline.describe import Traffic, boundary_bytes
from slapo_tracing.nodes import wrap_forward

from ..families import small
from ..stage_comparison import assert_same_as_model, cut

HIDDEN = 4 * 8 * 4
"""Bytes of the values that pass from layer to layer here."""


class Layers(nn.Module):
    """Four layers; ``early`` makes more of the first one's result, ``late`` puts it to the results of the third and fourth."""

    def __init__(self, early: Callable[..., Any], late: Callable[..., Any] = operator.add) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.weight = nn.Parameter(torch.randn(8))
        self.register_buffer("scale", torch.rand(8))
        self.functions = [early, late]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early, late = self.functions
        h = torch.tanh(self.a(x))
        made = early(self, h)
        for layer in (self.b, self.c, self.d):
            h = torch.tanh(layer(h))
            if layer is not self.b:
                h = late(h, made)
        return h.pow(2).mean()


def traffic(model: nn.Module, *paths: str) -> Traffic:
    """Return the traffic between the stages, after a comparison of the stages with the model."""
    return boundary_bytes(assert_same_as_model(model, {"x": torch.randn(4, 8)}, *paths))


SENT_SMALL = {
    "a wider type": lambda self, h: h.double() * 2,
    "repeated": lambda self, h: torch.cat([h, h, h, h]),
    "expanded": lambda self, h: h[None].expand(5, 4, 8),
    "one of many parts": lambda self, h: torch.cat([h, h * 2]).chunk(2)[1],
    "under no_grad": torch.no_grad()(lambda self, h: torch.cat([h, h, h]).double()),
    "under autocast": torch.autocast("cpu", torch.bfloat16)(lambda self, h: torch.cat([h, h.double(), h]) * 2),
    "a mask": lambda self, h: torch.where(h > 0, h, 0.5 * h),
}


@pytest.mark.parametrize("name", SENT_SMALL)
@pytest.mark.parametrize("paths", [("a",), ("b",), ("a", "b"), ("a", "b", "c"), ("b", "c"), ("c",)])
def test_what_is_cheap_is_made_again(name: str, paths: tuple[str, ...]) -> None:
    def late(h: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return h + made.to(h.dtype).reshape(-1, 4, 8).sum(0)

    for crossed, path in zip(traffic(Layers(SENT_SMALL[name], late), *paths).boundaries, paths, strict=True):
        hidden = 1 if path == "a" else 2
        assert (crossed.forward, crossed.backward) == (hidden * HIDDEN, hidden * HIDDEN)


def test_a_mask_takes_a_byte_per_number() -> None:
    def early(self: Layers, h: torch.Tensor) -> torch.Tensor:
        return ((h > 0) & (h < 0.5)).to(h.dtype)[:, None].repeat(1, 8, 1) * h[:, :1, None]

    (found,) = traffic(Layers(early, lambda h, made: h + made.sum(1)), "b").boundaries
    assert {(value.shape, value.dtype) for value in found.values[:2]} == {((4, 8), torch.bool), ((4, 1, 1), torch.float32)}
    assert (found.forward, found.backward) == (HIDDEN + 4 * 8 + 4 * 4, HIDDEN + 4 * 4)


def test_a_part_of_what_is_sent_anyway_costs_nothing() -> None:
    found = traffic(Layers(lambda self, h: (h, h[:, :2] * 2), lambda h, made: h * made[0] + made[1].sum()), "b")
    assert [value.shape for value in found.boundaries[0].values] == [(4, 8), (4, 8)]


def test_what_is_smaller_than_its_source_is_sent() -> None:
    found = traffic(Layers(lambda self, h: h[:, :1] * 2), "b")
    assert [value.shape for value in found.boundaries[0].values] == [(4, 1), (4, 8)]


def test_a_detached_value_takes_no_gradient_back() -> None:
    found = traffic(Layers(lambda self, h: h.detach() * 2), "b").boundaries[0]
    assert (found.forward, found.backward) == (2 * HIDDEN, HIDDEN)
    found = traffic(Layers(lambda self, h: h.detach() * 2), "a").boundaries[0]
    assert (found.forward, found.backward) == (HIDDEN, HIDDEN)


def _changed(self: Layers, h: torch.Tensor) -> torch.Tensor:
    made = torch.cat([h, h])
    made.mul_(2)
    return made


NOT_AGAIN = {
    "a parameter": lambda self, h: torch.cat([h, h]) * self.weight,
    "a buffer": lambda self, h: torch.cat([h, h]) * self.scale,
    "a random number": lambda self, h: nn.functional.dropout(torch.cat([h, h]), 0.5),
    "a change in place": _changed,
    "a product": lambda self, h: h.repeat(2, 1) @ torch.ones(8, 8, dtype=h.dtype),
}


@pytest.mark.parametrize("name", NOT_AGAIN)
@pytest.mark.parametrize("paths", [("b",), ("a", "b", "c")])
def test_what_is_dear_or_would_differ_is_sent(name: str, paths: tuple[str, ...]) -> None:
    found = traffic(Layers(NOT_AGAIN[name], lambda h, made: h + made[4:]), *paths)
    shapes = [sorted(value.shape for value in crossed.values) for crossed in found.boundaries]
    assert shapes == [[(4, 8)]] * (paths[0] == "a") + [[(4, 8), (8, 8)]] * (1 + ("c" in paths))


def test_what_stages_pass_on_is_what_the_last_makes_its_values_from() -> None:
    found = traffic(
        Layers(lambda self, h: h.double().exp()[None].expand(3, 4, 8), lambda h, made: h + made.sum(0).float()), "a", "b", "c"
    )
    assert [crossed.forward for crossed in found.boundaries] == [HIDDEN, 2 * HIDDEN, 2 * HIDDEN]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", [[(2, 12, 32)]] * 3),
        ("gpt2", [[(2, 12, 32)]] * 3),
        ("bert", [[(2, 12, 32)]] * 3),
    ],
)
def test_of_these_only_hidden_states_cross(name: str, expected: list[list[tuple[int, ...]]]) -> None:
    model, batch = small(name)
    layers = {"llama": "model.layers", "gpt2": "transformer.h", "bert": "bert.encoder.layer"}[name]
    program = assert_same_as_model(model, batch, *(f"{layers}.{index}" for index in range(3)))
    found = boundary_bytes(program)
    assert [[value.shape for value in crossed.values] for crossed in found.boundaries] == expected
    assert [(crossed.forward, crossed.backward) for crossed in found.boundaries] == [(2 * 12 * 32 * 4, 2 * 12 * 32 * 4)] * 3
    assert str(found).splitlines()[1].split()[:7] == ["0", "->", "1", "3,072", "B", "3,072", "B"]


T5_CUTS = ("encoder.block.0", "encoder", "decoder.block.0")
BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["t5", "mt5", "longt5", "switch_transformers"])
def test_t5_sends_hidden_states_and_the_encoders_result_alone(name: str) -> None:
    """The biases that all layers add are looked up in a table of the first one; the stages behind hold it too, tied."""
    model, batch = small(name)
    program = assert_same_as_model(model, batch, *T5_CUTS)
    inside, between, decoder = boundary_bytes(program).boundaries
    assert [value.shape for value in between.values] == [(2, 16, 32)]
    assert [value.shape for value in inside.values] == [(2, 16, 32)]
    assert sorted(value.shape for value in decoder.values) == [(2, 12, 32), (2, 16, 32)]
    table = "block.0.layer.0.LocalSelfAttention.relative_attention_bias.weight" if name == "longt5" else BIAS
    ties = {group.names: group.stages for group in program.ties}
    assert ties[(f"encoder.{table}",)] == (0, 1)
    assert ties[(f"decoder.{BIAS}",)] == (2, 3)


def test_the_table_of_stages_tells_what_is_sent_then() -> None:
    model, batch = small("t5")
    schedule = cut(model, batch).pipeline(boundaries=list(T5_CUTS))
    table = schedule.metadata.primitives["pipeline"]
    assert [stage.received for stage in table.stages[1:]] == [
        c.forward for c in boundary_bytes(build_program(schedule)).boundaries
    ]


def test_blocks_that_are_wrapped_stay_whole_and_send_their_biases() -> None:
    model, batch = small("t5")
    schedule = cut(model, batch, *T5_CUTS)
    for block in (*model.encoder.block, *model.decoder.block):
        wrap_forward(block, lambda call, *args, **kwargs: call(*args, **kwargs))
    inside, _, decoder = boundary_bytes(build_program(schedule)).boundaries
    assert [value.shape for value in inside.values] == [(2, 16, 32), (1, 4, 16, 16)]
    assert [value.shape for value in decoder.values] == [(2, 16, 32), (2, 12, 32), (1, 4, 12, 12), (1, 4, 12, 16)]


def test_gradients_in_half_precision_are_rounded_once_so_biases_are_sent() -> None:
    model, batch = small("t5")
    program = build_program(cut(model.bfloat16(), batch, *T5_CUTS))
    assert (1, 4, 16, 16) in [value.shape for value in boundary_bytes(program).boundaries[0].values]
    assert not any(BIAS in name for group in program.ties for name in group.names)


def test_other_shapes_and_modes_keep_the_holders() -> None:
    model, batch = small("t5")
    program = build_program(cut(model, batch, *T5_CUTS))
    short = {name: value[:, :3].contiguous() for name, value in batch.items()}
    for training in (True, False):
        model.train(training)
        again = program.replan(training, short)
        assert again is not None
        torch.testing.assert_close(again(**short).loss, model(**short).loss)
        assert {group.names: group.stages for group in again.ties} == {group.names: group.stages for group in program.ties}


class Graph(NamedTuple):
    """A random graph: what each node reads, its stage and bytes, and which nodes may run again."""

    order: list[fx.Node]
    home: dict[fx.Node, int]
    again: set[fx.Node]


@st.composite
def graphs(draw: st.DrawFn, size: int = 6, stages: int = 3) -> Graph:
    """Nodes in the order of their stages."""
    graph, order, home = fx.Graph(), list[fx.Node](), dict[fx.Node, int]()
    again: set[fx.Node] = set()
    places = sorted(draw(st.lists(st.integers(0, stages - 1), min_size=size, max_size=size)))
    for place in places:
        inputs = draw(st.lists(st.sampled_from(order), unique=True, max_size=2)) if order else []
        node = graph.call_function(torch.stack, (inputs,))
        value = torch.empty(draw(st.integers(1, 4)), device="meta", requires_grad=draw(st.booleans()))
        node.meta["val"] = value
        order.append(node)
        home[node] = place
        if inputs and draw(st.booleans()):
            again.add(node)
    return Graph(order, home, again)


def runs(graph: Graph, received: Sequence[Set[fx.Node]]) -> bool:
    """Return whether each stage has the inputs of its nodes and of the values it sends."""
    there: set[fx.Node] = set()
    for stage, values in enumerate(received):
        if not values <= there:
            return False
        there = set(values)
        for node in graph.order:
            if graph.home[node] == stage or (graph.home[node] < stage and node in graph.again):
                if there.issuperset(node.all_input_nodes):
                    there.add(node)
                elif node not in graph.again:
                    return False
    return True


def cost(received: Iterable[Iterable[fx.Node]]) -> int:
    """Bytes, there and back."""
    return sum(node.meta["val"].nbytes * (1 + node.meta["val"].requires_grad) for values in received for node in values)


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_no_other_choice_takes_fewer_bytes(graph: Graph) -> None:
    received, _ = MinimumCrossing(graph.order, graph.home, set(), graph.again, 3).run()
    assert runs(graph, received)
    early = [[node for node in graph.order if graph.home[node] < stage] for stage in range(3)]
    choices = [[set(some) for count in range(len(nodes) + 1) for some in combinations(nodes, count)] for nodes in early]
    assert cost(received) == min(cost(choice) for choice in product(*choices) if runs(graph, choice))


class Positions(nn.Module):
    """Adds positions that went through a dropout in each of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.dropout(torch.arange(8.0, device=x.device))
        return self.b(self.a(x + positions) + positions).pow(2).mean()


@pytest.mark.parametrize(("training", "values"), [(False, 1), (True, 2)])
def test_a_dropout_that_is_off_runs_in_each_stage(training: bool, values: int) -> None:
    assert len(traffic(Positions().train(training), "a").boundaries[0].values) == values
