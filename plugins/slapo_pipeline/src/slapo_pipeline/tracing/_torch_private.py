"""What is used of ``torch.distributed.pipelining`` by tracing, and of pytrees, beyond their public names, in one place."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree


@contextmanager
def replaced_pipe_split(instead: Callable[[], Any]) -> Iterator[None]:
    """Meanwhile ``torch.distributed.pipelining.pipe_split()`` calls ``instead``: what it calls else, no tracer here sees."""
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
    """The graph of a ``Pipe``, read.

    Args:
        inputs: Names of the model's arguments, tensors inside of structures by names of their own.
        arguments: Per stage what it is called with: names of inputs and of values, or constants.
        values: Per stage the names of what it gives, with their places in its result; None where it gives one tensor.
        result: What the model gives, flat: names, or constants.
    """

    inputs: list[str]
    arguments: list[list[Any]]
    values: list[dict[str, int | None]]
    result: list[Any]


class Name(str):
    """The name of a value, not a constant."""


def stage_calls(pipe: Any) -> StageCalls:
    """How the stages of a ``torch.distributed.pipelining.Pipe`` are called, in order."""
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


def flatten(value: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers, as ``torch.export`` takes them apart, and what puts them together again."""
    leaves, spec = _pytree.tree_flatten(value)
    return leaves, spec


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """The reverse of ``flatten``."""
    return _pytree.tree_unflatten(leaves, spec)
