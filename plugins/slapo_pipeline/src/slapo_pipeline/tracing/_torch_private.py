"""Private parts of ``torch.distributed.pipelining`` that tracing uses."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx


@contextmanager
def replaced_pipe_split(instead: Callable[[], Any]) -> Iterator[None]:
    """Let ``torch.distributed.pipelining.pipe_split()`` call ``instead`` while the context is open.

    No tracer here sees the operator that it calls otherwise.
    """
    if "torch.distributed.pipelining" not in sys.modules:  # then no model calls it
        yield
        return
    operators: Any = torch.ops.pippy
    before = operators._pipe_split
    operators._pipe_split = instead
    try:
        yield
    finally:
        operators._pipe_split = before


class StageCalls(NamedTuple):
    """The calls of the stages in the graph of a ``Pipe``.

    Args:
        inputs: Names of the model's arguments; tensors inside structures have names of their own.
        arguments: Per stage its arguments: names of inputs and of values, or constants.
        values: Per stage the names of its results with their index in the result tuple; None for a single tensor.
        result: Flat result of the model: names, or constants.
    """

    inputs: list[str]
    arguments: list[list[Any]]
    values: list[dict[str, int | None]]
    result: list[Any]


class Name(str):
    """The name of a value, not a constant."""


def stage_calls(pipe: Any) -> StageCalls:
    """Return the calls of the stages of a ``torch.distributed.pipelining.Pipe``, in order."""
    graph = pipe.info().graph
    name = {node: Name(node.target if node.op == "placeholder" else node.name) for node in graph.nodes}
    calls = graph.find_nodes(op="call_module")
    arguments = [[name[value] if isinstance(value, fx.Node) else value for value in call.args] for call in calls]
    values: list[dict[str, int | None]] = []
    for call in calls:
        parts: dict[str, int | None] = {name[user]: user.args[1] for user in call.users if user.target is operator.getitem}
        values.append(parts or {name[call]: None})
    result = graph.output_node().args[0]
    flat = result if isinstance(result, (tuple, list)) else [result]
    inputs = [str(name[node]) for node in graph.find_nodes(op="placeholder")]
    return StageCalls(inputs, arguments, values, [name[value] if isinstance(value, fx.Node) else value for value in flat])
