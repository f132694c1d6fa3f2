"""What crosses the boundaries: the values of fewest bytes from which all that runs behind can be had.

What is cheap is run again behind a boundary where what it is made from is there or takes fewer bytes to send: a cast, a
mask, an expanded position. That is a minimum cut. Per boundary each value has two places in a network, ``in`` and ``out``, an
edge of its bytes between them, and further edges that no cut can take: from all that runs once to the source, from all that
is used behind to the sink, and from a value to what can be made from it. ``out`` behind the cut means that the value is there
behind the boundary, ``in`` behind the cut that it is made there. The boundaries are cut at once: what is there behind one must
be there behind the one before it, or be made in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import torch
from torch import fx, nn

from slapo_tracing.nodes import function_name

from .alias_analysis import AliasAnalysis

Value = fx.Node
_Place = tuple[Value, int, str]

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
"""Functions and methods that cost next to nothing and give the same numbers whenever they run."""

_TENSOR_VIEW_ATTRIBUTES = frozenset("T mT H mH real imag".split())
_TENSOR_SETTERS = frozenset("requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook setattr".split())
"""What does something to a tensor besides its numbers."""


class Crossing(NamedTuple):
    """What is sent and what is run again.

    Args:
        received: Per stage the values it receives, none for the first.
        runs: Per stage the values that it makes, of those that may be made in any.
    """

    received: list[set[Value]]
    runs: list[set[Value]]


def recomputable_nodes(
    order: Sequence[Value],
    home: Mapping[Value, int],
    free: Set[Value],
    memory: AliasAnalysis,
    root: nn.Module,
    tables: Collection[str],
) -> set[Value]:
    """The nodes that may run again behind a boundary, with the same result and the same gradients.

    They read no parameter or buffer, but for those of ``tables``, draw no random numbers, change nothing, and nothing changes
    what they give, or what they read unless it is free. Where gradients are rounded to half precision they are rounded once, as
    in the model: such nodes are for one stage only.

    Args:
        order: All nodes.
        home: The stage that each node runs in by its place.
        free: Those that every stage can run for itself from the batch.
        memory: Of the graph.
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
                memory.of(other) & memory.changed.keys()
                for other in (node, *inputs)
                if not _is_remade_in_every_stage(other, free)
            )
            and all(
                not _reads_state(other, root) and ("val" in other.meta or other in found or other in free) for other in inputs
            )
            and not any(function_name(user) in _TENSOR_SETTERS for other in (node, *inputs) for user in other.users)
        ):
            found.add(node)
    used: dict[Value, set[int]] = {}
    for node in reversed(order):
        users = [user for user in node.users if user in used]
        used[node] = set().union(*({home[user]} if user in home and user not in found else used[user] for user in users))
    return {node for node in found if len(used[node]) < 2 or not _rounds_gradients(node)}


def _is_remade_in_every_stage(node: Value, free: Set[Value]) -> bool:
    """Whether every stage makes the value for itself, with all that changes it."""
    return node in free and node.op != "get_attr"


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
    """Whether it reads a parameter or a buffer, rather than a constant of the graph."""
    return node.op == "get_attr" and ("." in str(node.target) or hasattr(root, str(node.target)))


def node_bytes(node: Value) -> int:
    """Bytes of a tensor, as it is sent."""
    value: torch.Tensor = node.meta["val"]
    return value.numel() * value.dtype.itemsize


def minimum_crossing(
    order: Sequence[Value], home: Mapping[Value, int], free: Set[Value], again: Set[Value], num_stages: int
) -> Crossing:
    """Choose what crosses.

    Args:
        order: All nodes.
        home: The stage that each node runs in by its place; nodes that only put values together have none.
        free: Nodes that every stage can run for itself from the batch.
        again: Nodes that may run in later stages too.
        num_stages: Of the whole pipeline.
    """
    return _MinCut(order, home, free, again, num_stages).run()


class _MinCut:
    def __init__(
        self, order: Sequence[Value], home: Mapping[Value, int], free: Set[Value], again: Set[Value], num_stages: int
    ) -> None:
        self.num_stages = num_stages
        self.inputs = {node: [other for other in node.all_input_nodes if other not in free] for node in order}
        self.level: dict[Value, int] = {}
        for node in order:
            self.level[node] = home.get(node, max((self.level.get(other, 0) for other in self.inputs[node]), default=0))
        self.anywhere = {node for node in order if node not in free and (node in again or node not in home)}
        self.parts = {node for node in self.anywhere if node not in home}
        roots = [node for node in order if node not in free and node not in self.anywhere]
        self.live = self._with_sources(roots, lambda node: True)
        self.fixed = [[node for node in roots if self.level[node] == stage] for stage in range(num_stages)]

    def run(self) -> Crossing:
        needs = [self._needed_behind(stage) for stage in range(self.num_stages - 1)]
        wanted = [self._with_sources(need, self.anywhere.__contains__) for need in needs]
        made = self._made_behind(needs, wanted)
        received: list[set[Value]] = [set() for _ in range(self.num_stages)]
        runs: list[set[Value]] = [set() for _ in range(self.num_stages)]
        for stage in reversed(range(self.num_stages)):
            sent = received[stage + 1] if stage + 1 < self.num_stages else set()
            work = [*sent, *(other for node in self.fixed[stage] for other in self.inputs[node])]
            while work:
                node = work.pop()
                here = self.level[node] == stage
                if node in self.anywhere and (here or node in made[stage - 1]):
                    work += self.inputs[node] if node not in runs[stage] else ()
                    runs[stage].add(node)
                elif not here:
                    received[stage].add(node)
        return Crossing(received, runs)

    def _with_sources(self, nodes: Iterable[Value], through: Callable[[Value], bool]) -> set[Value]:
        """These nodes and what they are made from, as far as ``through`` lets one look."""
        found: set[Value] = set()
        work = list(nodes)
        while work:
            node = work.pop()
            if node not in found:
                found.add(node)
                work += self.inputs[node] if through(node) else ()
        return found

    def _needed_behind(self, stage: int) -> set[Value]:
        """What runs up to this stage and is used in later ones."""
        users = (node for node in self.live if self.level[node] > stage)
        return {other for node in users for other in self.inputs[node] if self.level[other] <= stage}

    def _made_behind(self, needs: list[set[Value]], wanted: list[set[Value]]) -> list[set[Value]]:
        """Per boundary what is made again behind it rather than received."""
        if not any(node in self.anywhere and node not in self.parts for values in wanted for node in values):
            return [values & self.parts for values in wanted]
        import networkx  # type: ignore[import-untyped]  # noqa: PLC0415  comes with torch; few models need it

        network = networkx.DiGraph()
        network.add_nodes_from(("source", "sink"))
        for boundary, values in enumerate(wanted):
            for node in values:
                begin, end = (node, boundary, "in") if node in self.anywhere else "source", (node, boundary, "out")
                network.add_edge(begin, end, capacity=self._cost(node))
                if node in self.anywhere:
                    network.add_edges_from(((other, boundary, "out"), begin) for other in self.inputs[node])
                if node in needs[boundary]:
                    network.add_edge(end, "sink")
                if boundary and node in wanted[boundary - 1]:
                    network.add_edge((node, boundary - 1, "out"), end)
        _, (_, behind) = networkx.minimum_cut(network, "source", "sink")
        return [{node for node in values if (node, stage, "in") in behind} for stage, values in enumerate(wanted)]

    def _cost(self, node: Value) -> int:
        """Bytes forward and backward; of equal ones fewer values are better, and what is no tensor is not sent."""
        if node in self.parts or "val" not in node.meta:
            return 1 << 80
        return (node_bytes(node) * (1 + bool(node.meta["val"].requires_grad)) << 20) + 1
