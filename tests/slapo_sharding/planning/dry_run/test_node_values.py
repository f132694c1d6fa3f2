"""Facts about the values of graph nodes."""

from __future__ import annotations

import operator
import sys

import torch
from torch import fx

from slapo_sharding.planning.dry_run.node_values import parameters_of


def with_value(node: fx.Node) -> fx.Node:
    node.meta["val"] = torch.ones(2, requires_grad=True)
    return node


def chain(graph: fx.Graph, start: fx.Node, length: int) -> fx.Node:
    value = start
    for _ in range(length):
        value = with_value(graph.call_function(operator.add, (value, 1)))
    return value


def test_parameters_of_a_value_deeper_than_the_recursion_limit() -> None:
    graph = fx.Graph()
    weight = with_value(graph.get_attr("weight"))
    assert parameters_of(chain(graph, weight, 2 * sys.getrecursionlimit())) == ["weight"]


def test_a_value_that_an_input_enters_has_no_parameters() -> None:
    graph = fx.Graph()
    weight, given = with_value(graph.get_attr("weight")), with_value(graph.placeholder("x"))
    both = with_value(graph.call_function(operator.mul, (weight, given)))
    assert parameters_of(chain(graph, both, 3)) == []


def test_every_parameter_is_named_once() -> None:
    graph = fx.Graph()
    first, second = (with_value(graph.get_attr(name)) for name in ("first", "second"))
    total = with_value(graph.call_function(operator.add, (first, second)))
    assert sorted(parameters_of(with_value(graph.call_function(operator.mul, (total, first))))) == ["first", "second"]
