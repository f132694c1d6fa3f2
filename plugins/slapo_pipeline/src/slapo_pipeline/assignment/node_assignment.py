"""Which stage runs which node of the flat graph, and what crosses from stage to stage.

A node belongs to the stage its place in the order of execution gives it. Exceptions: parts of a module's result belong to
the stage of that module, and what can be had from the batch alone without parameters (masks, positions, rotary tables) runs
in every stage that needs it, so that it need not be sent. Of the rest, what is cheap runs again behind a boundary where that
makes fewer bytes cross: see ``minimum_crossing``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import fx, nn

from slapo_core import TraceError
from slapo_tracing.nodes import expect, function_name, is_mode_node

from .alias_analysis import AliasAnalysis, is_container_item, mutated_values
from .autograd_calls import check_autograd_calls
from .min_cut import minimum_crossing, recomputable_nodes

_EXPENSIVE_FUNCTIONS = ("conv", "fft", "stft", "attention")
"""Parts of the names of functions that are dearer to run again than their result is to send."""


class Assignment(NamedTuple):
    """A flat graph, taken apart.

    Args:
        nodes: Per stage the nodes it runs, in order.
        received: Per stage the nodes whose values it receives, in order; none for the first.
        memory: Of the graph.
    """

    nodes: list[list[fx.Node]]
    received: list[list[fx.Node]]
    memory: AliasAnalysis


class Assigner:
    """Assigns the nodes of one graph.

    Args:
        graph: Flat graph, with ``val``, ``mutates`` and ``source`` in the nodes' ``meta``.
        root: The module that holds what the graph calls.
        positions: Where each stage but the last ends, ascending.
        tables: Paths of embeddings that several stages may hold, tied, rather than one send what it looks up.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module, positions: Sequence[int], tables: Collection[str] = ()) -> None:
        self.root, self.tables = root, tables
        self.num_stages = len(positions) + 1
        self.positions = positions
        self.place = {node: index for index, node in enumerate(graph.nodes)}
        self.order = [node for node in graph.nodes if not is_mode_node(node)]
        self.memory = AliasAnalysis(self.order)
        self.home: dict[fx.Node, int] = {}
        """Stage of each node that runs once; the others run wherever they are used."""
        self.shared: set[fx.Node] = set()
        """Nodes that every stage can run for itself from the batch alone, with the same result."""
        self.once: set[int] = set()
        """Memory that one stage makes, as a change of it is done once."""

    def run(self) -> Assignment:
        """Assign every node.

        Raises:
            TraceError: a value that is no tensor, one changed in place, or a gradient the forward takes would have to cross.
        """
        while not self._divide():
            pass
        again = recomputable_nodes(self.order, self.home, self.shared, self.memory, self.root, self.tables)
        crossing = minimum_crossing(self.order, self.home, self.shared, again, self.num_stages)
        stages = self._stages(again, crossing.runs)
        self._check_objects(stages)
        received = [[node for node in self.home if node in values] for values in crossing.received]
        self._check_changes(received)
        check_autograd_calls(self.order, stages, crossing.received, self.memory, self.root)
        nodes = [[node for node in self.order if stage in stages[node]] for stage in range(self.num_stages)]
        return Assignment(nodes, received, self.memory)

    # ---- where a node runs

    def _divide(self) -> bool:
        """Divide the nodes into those with a home and the others; False to begin anew, with more memory that has one.

        What is changed by a node that runs once is made once, as is what a change reaches that outlives the call.
        """
        self.home, self.shared = {}, set()
        for node in self.order:
            if node.op == "output":
                self.home[node] = self.num_stages - 1
            elif self._is_shared(node):
                self.shared.add(node)
            elif not _is_container(node):
                self.home[node] = self._home(node)
        lasting = {memory for node in self.order if node.op in ("placeholder", "get_attr") for memory in self.memory.of(node)}
        changed = self.memory.changed.items()
        once = {memory for memory, by in changed if memory in lasting or any(node in self.home for node in by)}
        done = once <= self.once
        self.once |= once
        return done

    def _is_shared(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            return True  # read where it is used
        if self.memory.of(node) & self.once:
            return False  # the change is done once, and what is a view of it sees it
        if node.op == "placeholder":
            return True
        if node.target is expect:
            return False  # nobody uses it, and yet it has to run
        if node.meta.get("draws") or not all(
            other in self.shared and not self._is_parameter(other) for other in node.all_input_nodes
        ):
            return False
        if node.op == "call_module":
            return isinstance(self.root.get_submodule(str(node.target)), (nn.Identity, nn.Dropout))  # of one that is off
        value = node.meta.get("val")
        differentiable = value is not None and value.requires_grad
        return not differentiable and not any(part in function_name(node).lower() for part in _EXPENSIVE_FUNCTIONS)

    def _is_parameter(self, node: fx.Node) -> bool:
        if node.op != "get_attr":
            return False
        *parents, name = str(node.target).split(".")
        return name in self.root.get_submodule(".".join(parents))._parameters

    def _home(self, node: fx.Node) -> int:
        if node.op == "placeholder":  # where it is used first
            return min(map(self._by_place, node.users), default=0)
        asked = next((other for other in node.all_input_nodes if other in self.home), None) if node.target is expect else None
        if asked is not None:
            return self.home[asked]  # others have a copy of what is asked
        if is_container_item(node) and node.args[0] in self.home:
            return self.home[node.args[0]]  # type: ignore[index]
        return max([self._by_place(node), *(self.home[other] for other in node.all_input_nodes if other in self.home)])

    def _by_place(self, node: fx.Node) -> int:
        return sum(position < self.place[node] for position in self.positions)

    def _stages(self, again: Set[fx.Node], runs: Sequence[Set[fx.Node]]) -> dict[fx.Node, set[int]]:
        """Stages in which each node runs: its home, those that run it ``again``, or every stage that uses it."""
        stages = {node: {stage for stage, nodes in enumerate(runs) if node in nodes} for node in self.order}
        for node, home in self.home.items():
            stages[node] |= set() if node in again else {home}
        for node in reversed(self.order):
            for other in node.all_input_nodes:
                if other not in self.home:
                    stages[other] |= stages[node]
        return self._with_changes(stages)

    def _with_changes(self, stages: dict[fx.Node, set[int]]) -> dict[fx.Node, set[int]]:
        """Where a shared value runs, what changes it in place runs too, with all that needs: its users may only see a view."""
        work = [
            (other, stage)
            for node in self.order
            for other in (self.memory.changes_of(node) if node not in self.home else ())
            for stage in stages[node]
        ]
        while work:
            node, stage = work.pop()
            if node in self.home or stage in stages[node]:
                continue
            stages[node].add(stage)
            work += [(other, stage) for other in node.all_input_nodes]
        return stages

    # ---- what crosses

    def _check_objects(self, stages: Mapping[fx.Node, set[int]]) -> None:
        """Values that are no tensors stay in one stage, unless every stage can make them anew."""
        for node in self.order:
            if "val" in node.meta or node.op in ("get_attr", "output") or (node.op == "placeholder" and node not in self.home):
                continue
            used = {stage for user in node.users if user in stages and not is_container_item(user) for stage in stages[user]}
            crosses = bool(used - stages[node]) if node in self.home else len(used) > 1 and _is_mutable_object(node)
            if crosses:
                kind = _type_name(node)
                cache = "set use_cache=False in the model's config, or give it in example_inputs and every batch"
                remedy = cache if "Cache" in kind else "cut where it is not in use"
                numbers = " and ".join(map(str, sorted(used | stages[node])))
                raise TraceError(
                    f"a {kind} is used by stages {numbers}, but only tensors can cross; {remedy}",
                    source=node.meta.get("source"),
                )

    def _check_changes(self, received: Sequence[Sequence[fx.Node]]) -> None:
        """What is received is a copy: two views of one memory must not be changed behind a boundary."""
        for stage in range(1, self.num_stages):
            seen: dict[int, fx.Node] = {}
            for node in received[stage]:
                late = any(self.home.get(other, 0) >= stage for other in self.memory.changes_of(node))
                for memory in self.memory.of(node):
                    if late and memory in seen:
                        pair = f"{seen[memory].name!r} and {node.name!r}"
                        message = f"{pair} share memory that stage {stage} changes in place; cut elsewhere"
                        raise TraceError(message, source=node.meta.get("source"))
                    seen[memory] = node


def _template(node: fx.Node) -> Any:
    """The object that the node makes anew at every call, or None."""
    return getattr(node.args[0], "value", None) if function_name(node) == "rebuild" and node.args else None


def _is_container(node: fx.Node) -> bool:
    """Whether the node only puts values together, so that each stage that uses the result can."""
    value = _template(node)
    return (dataclasses.is_dataclass(value) or isinstance(value, (Mapping, tuple))) and not any(map(mutated_values, node.users))


def _is_mutable_object(node: fx.Node) -> bool:
    return _template(node) is not None and not _is_container(node)


def _type_name(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"value that changes, given for {node.target!r},"
    value = _template(node)
    return type(value).__name__ if value is not None else f"result of {node.target}"
