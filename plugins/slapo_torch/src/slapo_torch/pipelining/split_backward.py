"""Backwards in two parts: whether the second finds every parameter's gradient, once.

``torch.distributed.pipelining`` goes, for the gradients of a stage's inputs, through the nodes between what the stage gives and
what it received, and keeps the gradients that arrive at those which parameters feed. From these it computes the parameters'
gradients later. One that feeds no such node, or gives something else besides, would get none or not all; one that feeds
several may get it twice, or not at all because an earlier part has freed what is needed. A reentrant checkpoint gives its
parameters their gradients on the way, and only where a backward runs whole; and only there hooks that wait for a parameter's
gradient to have been accumulated are called. A hook on a value in between would be called in both parts, so the forward is
watched for such hooks.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from ..gradients._torch_private import awaits_accumulation

_REENTRANT = "CheckpointFunctionBackward"


class TensorHookRecorder:
    """Inside of it hooks that are put on tensors are noted.

    A mode for torch functions would see them as well, and every other operation besides, for 2 % of a step.
    """

    found = False

    def __enter__(self) -> TensorHookRecorder:
        """Begin."""
        self._register = register = torch.Tensor.register_hook

        @functools.wraps(register)
        def noted(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
            self.found = True
            return register(tensor, hook)  # type: ignore[no-untyped-call]

        torch.Tensor.register_hook = noted  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        """End."""
        torch.Tensor.register_hook = self._register  # type: ignore[method-assign]


def can_split(outputs: Iterable[torch.Tensor], received: Iterable[torch.Tensor]) -> bool:
    """Whether each parameter behind the outputs feeds what was received at one node alone, and nothing else; with no
    reentrant checkpoint on the way, and no hook that waits for an accumulated gradient.

    Args:
        outputs: What the stage gives, or its loss.
        received: What it was given; leaves of autograd's graph.
    """
    roots = {_node(tensor) for tensor in outputs if tensor.requires_grad}
    between = {_node(tensor) for tensor in received if tensor.requires_grad}
    graph = _topological_order(roots)
    if any(type(node).__name__ == _REENTRANT for node in graph):
        return False
    leaves = {
        node: leaf for node, after in graph.items() if not after and (leaf := getattr(node, "variable", None)) is not None
    }
    if any(map(awaits_accumulation, leaves.values())):
        return False
    users: dict[Node, list[Node]] = defaultdict(list)
    for node, children in graph.items():
        for child in children:
            users[child].append(node)
        if not between.isdisjoint(children):
            between.add(node)
    meets: dict[Node, Node | None] = {}
    """The one node between outputs and received values that one feeds; None where there is none, or are several."""
    for node in reversed(graph):
        if node in between:
            meets[node] = node
            continue
        fed = {meets[user] for user in users[node]}
        meets[node] = fed.pop() if len(fed) == 1 and node not in roots else None
        if meets[node] is None and isinstance(leaves.get(node), torch.nn.Parameter):
            return False
    return True


def _node(tensor: torch.Tensor) -> Node:
    return get_gradient_edge(tensor).node


def _topological_order(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """All nodes of a graph, each after those it passes gradients to, and these."""
    found: dict[Node, list[Node]] = {}
    children: dict[Node, list[Node]] = {}
    waiting = list(roots)
    while waiting:
        node = waiting[-1]
        if node not in children:
            children[node] = [child for child, _ in node.next_functions if child is not None]
            waiting += [child for child in children[node] if child not in children]
        else:
            waiting.pop()
            found.setdefault(node, children[node])
    return found
