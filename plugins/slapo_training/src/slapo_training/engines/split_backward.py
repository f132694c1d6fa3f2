"""Test whether a backward can be split in two: input gradients first, parameter gradients later.

For input gradients, ``torch.distributed.pipelining`` runs the autograd nodes between outputs and received tensors. It keeps the
gradients that arrive at nodes fed by parameters, and computes parameter gradients from them later. This is right only if each
parameter feeds exactly one such node. Fed to no such node, or to other nodes as well, a parameter would lose gradients. Fed to
several, it may get its gradient twice, or not at all since an earlier part freed saved tensors. The runtime detaches outputs in
place after the first part, which ends the use of an output by the other outputs' nodes.

A reentrant checkpoint computes parameter gradients on the way, in an unsplit backward only. Post-accumulate hooks are called in
an unsplit backward only. A hook on a tensor in between would be called in both parts, so the forward records such hooks.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from ..distributed._torch_private import awaits_accumulation

_REENTRANT = "CheckpointFunctionBackward"


@contextmanager
def note_tensor_hooks(note: Callable[[], None]) -> Iterator[None]:
    """Context that calls ``note`` for each hook that is registered on a tensor.

    A torch function mode would also see each other operation, which costs 2 % of a step.
    """
    register = torch.Tensor.register_hook

    @functools.wraps(register)
    def register_and_note(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        note()
        return register(tensor, hook)  # type: ignore[no-untyped-call]

    torch.Tensor.register_hook = register_and_note  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]


def can_split_backward(outputs: Iterable[torch.Tensor], received: Iterable[torch.Tensor]) -> bool:
    """Return True if a stage's backward can be split in two.

    Each parameter must feed exactly one node between outputs and received tensors. No output may be computed from another one.
    The graph must have no reentrant checkpoint and no post-accumulate hook.
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
    if any(users[root] and graph[root] for root in roots):
        return False
    meets: dict[Node, Node | None] = {}
    """The one node between outputs and received tensors that each node feeds; None if it feeds none or several."""
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
    """Return the nodes that each node passes gradients to, in topological order: these nodes come first."""
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
