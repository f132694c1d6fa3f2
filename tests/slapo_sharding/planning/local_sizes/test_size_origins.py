"""Origins of a traced model's sizes, and the search that they save."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, create_schedule
from slapo_sharding import plugin
from slapo_sharding.planning.derivation import flat_graphs
from slapo_sharding.planning.local_sizes.size_origins import SizeWithOrigin, can_become, record_origins, strip_origins
from slapo_testing import run_distributed
from slapo_tracing import trace
from tests.slapo_sharding.split_families import family


class Config:
    def __init__(self) -> None:
        self.heads, self.name, self.odd = 4, "config", 7


class Attention(nn.Module):
    """Attention with sizes from its own attributes, from its config, and from shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.width, self.flag = Config(), 8, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.config.heads * self.width
        parts = x[..., :queries], x[..., queries : queries + 2 * self.width]
        batch, length, _ = x.shape
        return torch.cat(parts, -1).view(batch, length * self.config.heads, -1)


def _nodes(model: nn.Module) -> list[fx.Node]:
    with record_origins(model, 2):
        graph = trace(model, flatten=True, example_inputs=(torch.randn(2, 3, 64),), symbolic=False).graph
    strip_origins(graph)
    return [node for node in graph.nodes if node.op.startswith("call")]


def test_a_size_follows_its_attributes():
    model = Attention()
    first, second, _, view = _nodes(model)
    heads, width = {(id(model.config), "heads"): 2}, {(id(model), "width"): 4}
    assert can_become(first, 32, 16, heads)
    assert can_become(first, 32, 16, width)
    assert not can_become(first, 32, 16, {})
    assert not can_become(first, 32, 16, {**heads, **width})
    assert can_become(second, 48, 24, width)
    assert not can_become(second, 48, 20, heads)
    assert can_become(second, 48, 24, heads), "the 2 in the code might be a length that is split too"
    assert can_become(view, 12, 6, heads)


def test_attributes_not_given_have_their_present_values():
    model = Attention()
    first = _nodes(model)[0]
    model.width = 4
    assert can_become(first, 32, 16, {})
    assert not can_become(first, 32, 16, {(id(model.config), "heads"): 2})


def test_a_size_without_an_origin_can_become_anything():
    model = Attention()
    view = _nodes(model)[-1]
    assert can_become(view, 2, 1, {})


def test_graph_and_model_get_plain_integers_back():
    model = Attention()
    given: list[object] = []
    for node in _nodes(model):
        fx.node.map_aggregate((node.args, node.kwargs), given.append)
    assert {type(value) for value in given if isinstance(value, int)} == {int}
    assert vars(model.config) == {"heads": 4, "name": "config", "odd": 7}
    assert {type(value) for value in (model.config.heads, model.width)} == {int}
    assert model.flag is True


def test_attributes_are_restored_after_a_failed_trace():
    model = Attention()
    with pytest.raises(ZeroDivisionError), record_origins(model, 2):
        assert model.width // 0
    assert type(model.width) is int


OPERATIONS = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod]


def _half(value: int) -> SizeWithOrigin:
    return SizeWithOrigin(value, 2, lambda values: {value // 2 if values else value})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_arithmetic_from_both_sides(operation):
    for made, whole, part in (
        (operation(_half(12), 5), operation(12, 5), operation(6, 5)),
        (operation(65, _half(12)), operation(65, 12), operation(65, 6)),
        (operation(_half(12), _half(4)), operation(12, 4), operation(6, 2)),
    ):
        assert type(made) is SizeWithOrigin
        assert made == whole
        assert made.possible_values({(0, "one"): 1}) == {part}


def test_numbers_that_may_be_whole_or_local_sizes():
    assert (_half(12) * 4).possible_values({(0, "one"): 1}) == {24, 12}
    assert (3 // _half(2) % (_half(2) - 1)).possible_values({(0, "one"): 1}) == set(), "nothing can be divided by zero"
    assert type(_half(12) * 0.5) is float


class Sums(nn.Module):
    """Module with a size of more terms than are followed."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = self.width
        for _ in range(4):
            size = size + size
        return x[..., :size]


def test_long_sums_can_become_anything():
    (node,) = _nodes(Sums())
    assert can_become(node, 32, 16, {})
    assert not _half(32).possible_values({}) & {16}


def _traces(rank: int, name: str) -> int:
    """Count the traces of the model; the first attempt finds both attributes to make local."""
    model, batch = family(name)
    count, traced = 0, flat_graphs.trace

    def counting(*args, **kwargs):
        nonlocal count
        count += 1
        return traced(*args, **kwargs)

    flat_graphs.trace = counting
    try:
        create_schedule(
            model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=batch
        ).tensor_parallel(sequence_parallel=True)
    finally:
        flat_graphs.trace = traced
    return count


@pytest.mark.sampled(2)
@pytest.mark.multiproc
@pytest.mark.parametrize(("name", "number"), [("phi3", 3), ("openai-gpt", 3), ("gpt2", 2)])
def test_a_plan_takes_few_traces(name, number):
    assert run_distributed(_traces, 2, name) == [number, number]
