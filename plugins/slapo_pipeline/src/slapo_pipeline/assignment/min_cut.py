"""The values that cross the boundaries: the fewest bytes from which the later stages can compute the rest.

A cheap node, such as a cast, a mask or an expanded position, runs again behind a boundary if its inputs are there or take
fewer bytes to send. The choice is a minimum cut. The network has two vertices per boundary and value, ``in`` and ``out``, and
an edge between them whose capacity is the bytes of the value. Edges without a capacity cannot be cut. They join the source to
each node that runs once, each value that is used behind the boundary to the sink, and each value to those computed from it.
``out`` on the sink's side means that the value exists behind the boundary; ``in`` on that side, that it is computed there.
All boundaries are cut at once: a value that exists behind one boundary exists behind the one before, or is computed in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence, Set

import torch
from torch import fx, nn

from slapo_tracing.nodes import function_name

from .alias_analysis import AliasAnalysis, with_sources

Value = fx.Node

_CHEAP = frozenset(
    """
    view view_as reshape reshape_as flatten unflatten permute transpose t swapaxes swapdims movedim moveaxis unsqueeze squeeze
    expand expand_as broadcast_to narrow select unbind chunk split tensor_split contiguous clone detach getitem
    to type type_as float half bfloat16 double int long bool
    zeros_like ones_like full_like new_zeros new_ones new_full
    add sub mul div truediv neg pow sqrt rsqrt reciprocal square exp log abs sin cos tanh sigmoid relu gelu silu sign floor ceil
    round floordiv mod remainder clamp clamp_min clamp_max maximum minimum where masked_fill
    eq ne lt le gt ge and_ or_ xor invert logical_and logical_or logical_not
    cat stack repeat repeat_interleave flip roll pad tril triu
    """.split()
)
"""Deterministic functions and methods of negligible cost."""

_TENSOR_VIEW_ATTRIBUTES = frozenset("T mT H mH real imag".split())
_TENSOR_SETTERS = frozenset("requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook setattr".split())
"""Calls that change a tensor other than in its values; a recomputed copy would lack the change."""


def recomputable_nodes(
    order: Sequence[Value],
    home: Mapping[Value, int],
    batch_only: Set[Value],
    aliases: AliasAnalysis,
    root: nn.Module,
    tables: Collection[str],
) -> set[Value]:
    """Return the nodes that can run again behind a boundary with the same result and the same gradients.

    Such a node reads no parameter or buffer except ``tables``, draws no random numbers and changes nothing. No node changes its
    result, or its inputs unless they need the batch alone. A node with gradients in half precision must be used in one stage
    only: the model rounds its gradient once, and copies would round their shares.

    Args:
        home: The stage that each node runs in by its position.
        batch_only: Nodes that every stage can run from the batch alone.
        root: The module that holds what the graph reads.
        tables: Paths of embeddings that several stages may hold, tied.
    """
    found: set[Value] = set()
    for node in order:
        inputs = node.all_input_nodes
        if (
            inputs
            and (_is_cheap(node) or (node.op == "call_module" and node.target in tables))
            and not any(
                aliases.memory_of(other) & aliases.mutations.keys()
                for other in (node, *inputs)
                if other not in batch_only or other.op == "get_attr"  # others are made anew, mutations too, in every stage
            )
            and all(
                not _reads_state(other, root) and ("val" in other.meta or other in found or other in batch_only)
                for other in inputs
            )
            and not any(function_name(user) in _TENSOR_SETTERS for other in (node, *inputs) for user in other.users)
        ):
            found.add(node)
    used: dict[Value, set[int]] = {}
    for node in reversed(order):
        users = [user for user in node.users if user in used]
        used[node] = set().union(*({home[user]} if user in home and user not in found else used[user] for user in users))
    return {node for node in found if len(used[node]) < 2 or not _rounds_gradients(node)}


def _rounds_gradients(node: Value) -> bool:
    values = [other.meta["val"] for other in (node, *node.all_input_nodes) if "val" in other.meta]
    narrow = any(value.is_floating_point() and value.dtype.itemsize < 4 for value in values)
    return narrow and any(value.requires_grad for value in values)


def _is_cheap(node: Value) -> bool:
    if node.op not in ("call_function", "call_method") or any(map(node.meta.get, ("draws", "mutates", "changes", "dynamic"))):
        return False
    if node.target is getattr:
        return node.args[1] in _TENSOR_VIEW_ATTRIBUTES
    home = (inspect.getmodule(node.target) or torch).__name__ if callable(node.target) else "torch"
    return function_name(node) in _CHEAP and home.split(".")[0] in ("torch", "operator", "_operator", "builtins")


def _reads_state(node: Value, root: nn.Module) -> bool:
    """Return whether the node reads a parameter or a buffer, rather than a constant of the graph."""
    return node.op == "get_attr" and ("." in str(node.target) or hasattr(root, str(node.target)))


def node_bytes(node: Value) -> int:
    """Return the bytes of a node's tensor, as it is sent: contiguous."""
    value: torch.Tensor = node.meta["val"]
    return value.numel() * value.dtype.itemsize


class MinimumCrossing:
    """Choice of the values that cross each boundary.

    Args:
        home: The stage that each node runs in by its position; nodes that only build a container have none.
        batch_only: Nodes that every stage can run from the batch alone.
        recomputable: Nodes that may run in later stages too.
    """

    def __init__(
        self,
        order: Sequence[Value],
        home: Mapping[Value, int],
        batch_only: Set[Value],
        recomputable: Set[Value],
        num_stages: int,
    ) -> None:
        self.num_stages = num_stages
        self.inputs = {node: [other for other in node.all_input_nodes if other not in batch_only] for node in order}
        self.earliest_stage: dict[Value, int] = {}
        for node in order:
            self.earliest_stage[node] = home.get(
                node, max((self.earliest_stage.get(other, 0) for other in self.inputs[node]), default=0)
            )
        self.movable = {node for node in order if node not in batch_only and (node in recomputable or node not in home)}
        self.containers = {node for node in self.movable if node not in home}
        roots = [node for node in order if node not in batch_only and node not in self.movable]
        self.used = with_sources(roots, self.inputs.__getitem__)
        self.fixed = [[node for node in roots if self.earliest_stage[node] == stage] for stage in range(num_stages)]

    def run(self) -> tuple[list[set[Value]], list[set[Value]]]:
        """Return per stage the values that it receives, none for the first, and the movable values that it computes."""
        later = [[node for node in self.used if self.earliest_stage[node] > stage] for stage in range(self.num_stages - 1)]
        needs = [
            {other for node in users for other in self.inputs[node] if self.earliest_stage[other] <= stage}
            for stage, users in enumerate(later)
        ]
        wanted = [with_sources(need, lambda node: self.inputs[node] if node in self.movable else ()) for need in needs]
        made = self._made_behind(needs, wanted)
        received: list[set[Value]] = [set() for _ in range(self.num_stages)]
        runs: list[set[Value]] = [set() for _ in range(self.num_stages)]
        for stage in reversed(range(self.num_stages)):
            sent = received[stage + 1] if stage + 1 < self.num_stages else set()
            work = [*sent, *(other for node in self.fixed[stage] for other in self.inputs[node])]
            while work:
                node = work.pop()
                here = self.earliest_stage[node] == stage
                if node in self.movable and (here or node in made[stage - 1]):
                    work += self.inputs[node] if node not in runs[stage] else ()
                    runs[stage].add(node)
                elif not here:
                    received[stage].add(node)
        return received, runs

    def _made_behind(self, needs: list[set[Value]], wanted: list[set[Value]]) -> list[set[Value]]:
        """Return per boundary the values that are recomputed behind it rather than received."""
        if not any(node in self.movable and node not in self.containers for values in wanted for node in values):
            return [values & self.containers for values in wanted]
        import networkx  # type: ignore[import-untyped]  # noqa: PLC0415  comes with torch; few models need it

        network = networkx.DiGraph()
        network.add_nodes_from(("source", "sink"))
        for boundary, values in enumerate(wanted):
            for node in values:
                begin, end = (node, boundary, "in") if node in self.movable else "source", (node, boundary, "out")
                network.add_edge(begin, end, capacity=self._cost(node))
                if node in self.movable:
                    network.add_edges_from(((other, boundary, "out"), begin) for other in self.inputs[node])
                if node in needs[boundary]:
                    network.add_edge(end, "sink")
                if boundary and node in wanted[boundary - 1]:
                    network.add_edge((node, boundary - 1, "out"), end)
        _, (_, behind) = networkx.minimum_cut(network, "source", "sink")
        return [{node for node in values if (node, stage, "in") in behind} for stage, values in enumerate(wanted)]

    def _cost(self, node: Value) -> int:
        """Return the bytes forward and backward, scaled so that of equal sums the one with fewer values is less."""
        if node in self.containers or "val" not in node.meta:
            return 1 << 80  # more than any sum: only tensors can be sent
        return (node_bytes(node) * (1 + bool(node.meta["val"].requires_grad)) << 20) + 1
