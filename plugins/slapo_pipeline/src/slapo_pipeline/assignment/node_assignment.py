"""The assignment of a flat graph's nodes to stages, and the values that cross between stages.

A node runs in the stage that its position in the order of execution gives it, with three exceptions. Items of a module's
result belong to the stage of that module. Nodes that need the batch alone and no parameter (masks, positions, rotary tables)
run in every stage that uses them. Cheap nodes run again behind a boundary if fewer bytes cross then (``min_cut``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from slapo_core import TraceError
from slapo_tracing.nodes import expect, function_name, is_mode_node

from .alias_analysis import AliasAnalysis, is_container_item, mutated_values, with_sources
from .min_cut import MinimumCrossing, recomputable_nodes

_EXPENSIVE_FUNCTIONS = ("conv", "fft", "stft", "attention")
"""Substrings of the names of functions whose result is cheaper to send than to recompute."""


class Assignment(NamedTuple):
    """The nodes that each stage of a flat graph runs, and the values that it receives (none in the first), in order."""

    nodes: list[list[fx.Node]]
    received: list[list[fx.Node]]
    aliases: AliasAnalysis


class Assigner:
    """Assigns the nodes of one graph.

    Args:
        graph: Flat graph, with ``val``, ``mutates`` and ``source`` in the nodes' ``meta``.
        root: The module that holds what the graph calls.
        positions: Index of the last node of each stage but the last, ascending.
        tables: Paths of embeddings that several stages may hold as tied parameters, instead of sending their results.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module, positions: Sequence[int], tables: Collection[str] = ()) -> None:
        self.root, self.tables = root, tables
        self.num_stages = len(positions) + 1
        self.positions = positions
        self.index = {node: index for index, node in enumerate(graph.nodes)}
        self.order = [node for node in graph.nodes if not is_mode_node(node)]
        self.aliases = AliasAnalysis(self.order)
        self.home_stage: dict[fx.Node, int] = {}
        """Stage of each node that runs once; the other nodes run wherever they are used."""
        self.batch_only: set[fx.Node] = set()
        """Nodes that every stage can run from the batch alone, with the same result."""
        self.single_owner_memory: set[int] = set()
        """Memory that a node which runs once changes; one stage computes the value and applies the change."""

    def run(self) -> Assignment:
        """Assign every node.

        Raises:
            TraceError: a value that is not a tensor, a value changed in place, or the path of a gradient that the forward
                takes would have to cross a boundary.
        """
        while not self._find_home_stages():
            pass  # each pass that is not the last adds memory with a single owner
        recomputable = recomputable_nodes(self.order, self.home_stage, self.batch_only, self.aliases, self.root, self.tables)
        crossing = MinimumCrossing(self.order, self.home_stage, self.batch_only, recomputable, self.num_stages)
        sets, runs = crossing.run()
        stages = self._stages(recomputable, runs)
        self._check_objects(stages)
        received = [[node for node in self.home_stage if node in values] for values in sets]
        self._check_received_aliases(received)
        check_autograd_calls(self.order, stages, sets, self.aliases, self.root)
        nodes = [[node for node in self.order if stage in stages[node]] for stage in range(self.num_stages)]
        return Assignment(nodes, received, self.aliases)

    # ---- where a node runs

    def _find_home_stages(self) -> bool:
        """Find the nodes that run once. Return False if more memory turned out to have a single owner, to run again.

        Memory has a single owner if a node that runs once changes it, or if its mutation outlives the call, as that of a
        buffer or of an argument does.
        """
        self.home_stage, self.batch_only = {}, set()
        for node in self.order:
            if node.op == "output":
                self.home_stage[node] = self.num_stages - 1
            elif self._is_batch_only(node):
                self.batch_only.add(node)
            elif not _is_container(node):
                self.home_stage[node] = self._find_home(node)
        persistent = {
            memory for node in self.order if node.op in ("placeholder", "get_attr") for memory in self.aliases.memory_of(node)
        }
        changed = self.aliases.mutations.items()
        once = {memory for memory, by in changed if memory in persistent or any(node in self.home_stage for node in by)}
        done = once <= self.single_owner_memory
        self.single_owner_memory |= once
        return done

    def _is_batch_only(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            return True  # read where it is used
        if self.aliases.memory_of(node) & self.single_owner_memory:
            return False  # the change is applied once, and every view sees it
        if node.op == "placeholder":
            return True
        if node.target is expect:
            return False  # it has no users, and yet has to run
        if node.meta.get("draws") or not all(
            other in self.batch_only and not self._is_parameter(other) for other in node.all_input_nodes
        ):
            return False
        if node.op == "call_module":
            # a dropout that draws was excluded above; this one is off
            return isinstance(self.root.get_submodule(str(node.target)), (nn.Identity, nn.Dropout))
        value = node.meta.get("val")
        differentiable = value is not None and value.requires_grad
        return not differentiable and not any(part in function_name(node).lower() for part in _EXPENSIVE_FUNCTIONS)

    def _is_parameter(self, node: fx.Node) -> bool:
        if node.op != "get_attr":
            return False
        *parents, name = str(node.target).split(".")
        return name in self.root.get_submodule(".".join(parents))._parameters

    def _find_home(self, node: fx.Node) -> int:
        if node.op == "placeholder":  # the stage that uses it first
            return min(map(self._stage_by_order, node.users), default=0)
        asked = (
            next((other for other in node.all_input_nodes if other in self.home_stage), None) if node.target is expect else None
        )
        if asked is not None:
            return self.home_stage[asked]  # other stages have a copy of the value that is checked
        if is_container_item(node) and node.args[0] in self.home_stage:
            return self.home_stage[node.args[0]]  # type: ignore[index]
        return max(
            [
                self._stage_by_order(node),
                *(self.home_stage[other] for other in node.all_input_nodes if other in self.home_stage),
            ]
        )

    def _stage_by_order(self, node: fx.Node) -> int:
        return sum(position < self.index[node] for position in self.positions)

    def _stages(self, recomputable: Set[fx.Node], runs: Sequence[Set[fx.Node]]) -> dict[fx.Node, set[int]]:
        """Return the stages that run each node: its home, those that recompute it, or all that use it."""
        stages = {node: {stage for stage, nodes in enumerate(runs) if node in nodes} for node in self.order}
        for node, home in self.home_stage.items():
            stages[node] |= set() if node in recomputable else {home}
        for node in reversed(self.order):
            for other in node.all_input_nodes:
                if other not in self.home_stage:
                    stages[other] |= stages[node]
        return self._with_mutations(stages)

    def _with_mutations(self, stages: dict[fx.Node, set[int]]) -> dict[fx.Node, set[int]]:
        """Add to each stage that computes a value the in-place changes of that value, with their inputs.

        The users of the value may hold only a view of it, so the change need not be among their inputs.
        """
        work = [
            (other, stage)
            for node in self.order
            for other in (self.aliases.mutations_of(node) if node not in self.home_stage else ())
            for stage in stages[node]
        ]
        while work:
            node, stage = work.pop()
            if node in self.home_stage or stage in stages[node]:
                continue
            stages[node].add(stage)
            work += [(other, stage) for other in node.all_input_nodes]
        return stages

    # ---- what crosses

    def _check_objects(self, stages: Mapping[fx.Node, set[int]]) -> None:
        """Refuse a value that is not a tensor and would have to cross, unless every stage can compute it."""
        for node in self.order:
            if (
                "val" in node.meta
                or node.op in ("get_attr", "output")
                or (node.op == "placeholder" and node not in self.home_stage)
            ):
                continue
            used = {stage for user in node.users if user in stages and not is_container_item(user) for stage in stages[user]}
            is_mutable = _template(node) is not None and not _is_container(node)
            if used - stages[node] if node in self.home_stage else len(used) > 1 and is_mutable:
                kind = _type_name(node)
                cache = "set use_cache=False in the model's config, or give it in example_inputs and every batch"
                remedy = cache if "Cache" in kind else "cut where it is not in use"
                numbers = " and ".join(map(str, sorted(used | stages[node])))
                raise TraceError(
                    f"a {kind} is used by stages {numbers}, but only tensors can cross; {remedy}",
                    source=node.meta.get("source"),
                )

    def _check_received_aliases(self, received: Sequence[Sequence[fx.Node]]) -> None:
        """Refuse two received views of one memory that is changed later: each is received as a copy of its own."""
        for stage in range(1, self.num_stages):
            seen: dict[int, fx.Node] = {}
            for node in received[stage]:
                late = any(self.home_stage.get(other, 0) >= stage for other in self.aliases.mutations_of(node))
                for memory in self.aliases.memory_of(node):
                    if late and memory in seen:
                        pair = f"{seen[memory].name!r} and {node.name!r}"
                        message = f"{pair} share memory that stage {stage} changes in place; cut elsewhere"
                        raise TraceError(message, source=node.meta.get("source"))
                    seen[memory] = node


def _template(node: fx.Node) -> Any:
    """Return the object that the node builds anew at every call, or None."""
    return getattr(node.args[0], "value", None) if function_name(node) == "rebuild" and node.args else None


def _is_container(node: fx.Node) -> bool:
    """Return whether the node only builds a container that nothing changes, so that every stage can build its own."""
    value = _template(node)
    return (dataclasses.is_dataclass(value) or isinstance(value, (Mapping, tuple))) and not any(map(mutated_values, node.users))


def _type_name(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"value that changes, given for {node.target!r},"
    value = _template(node)
    return type(value).__name__ if value is not None else f"result of {node.target}"


def check_autograd_calls(
    order: Sequence[fx.Node],
    stages: Mapping[fx.Node, Set[int]],
    received: Sequence[Set[fx.Node]],
    aliases: AliasAnalysis,
    root: nn.Module,
) -> None:
    """Refuse ``torch.autograd.grad`` if a path from its inputs to its outputs crosses a boundary.

    Autograd would not see that path, and the gradient would lack its share.

    Raises:
        TraceError: there is such a path.
    """
    for node in order:
        if node.target is not torch.autograd.grad:
            continue
        outputs, inputs = (list(_argument(node, place, name)) for place, name in enumerate(("outputs", "inputs")))
        before = with_sources(outputs, lambda node: node.all_input_nodes)
        for source in inputs:
            between = _descendants(source, order, aliases, root)
            for stage in sorted(stages[node]):
                if late := next((value for value in received[stage] if value in between and value in before), None):
                    where = node.meta.get("module") or "the forward"
                    raise TraceError(
                        f"{where}: torch.autograd.grad runs in stage {stage}, but {late.name!r}, between its outputs and "
                        f"{source.name!r}, comes from another stage, where it cannot follow; cut the model where all of "
                        "this is in one stage",
                        source=node.meta.get("source"),
                    )


def _argument(node: fx.Node, place: int, name: str) -> Iterator[fx.Node]:
    value = node.args[place] if place < len(node.args) else node.kwargs.get(name)
    return (part for part in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(part, fx.Node))


def _descendants(source: fx.Node, order: Sequence[fx.Node], aliases: AliasAnalysis, root: nn.Module) -> set[fx.Node]:
    """Return the nodes that autograd reaches from ``source``: by inputs, mutated memory, and holders of the parameter."""
    found: set[fx.Node] = set()
    changed: set[int] = set()
    holders = _other_uses_of_parameter(source, order, root)
    for node in order:
        value = node.meta.get("val")
        if node is source or (value is not None and not value.requires_grad):
            continue
        inputs: Collection[fx.Node] = node.all_input_nodes
        if node in holders or any(other is source or other in found or aliases.memory_of(other) & changed for other in inputs):
            found.add(node)
            changed |= {number for other in mutated_values(node) for number in aliases.memory_of(other)}
    return found


def _other_uses_of_parameter(source: fx.Node, order: Sequence[fx.Node], root: nn.Module) -> set[fx.Node]:
    """Return the nodes that use the parameter ``source`` reads, under any of its names, other than ``source``."""
    tensor = dict(root.named_parameters(remove_duplicate=False)).get(str(source.target)) if source.op == "get_attr" else None
    if tensor is None:
        return set()
    names = {name for name, parameter in root.named_parameters(remove_duplicate=False) if parameter is tensor}
    holding = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    uses = {"get_attr": names, "call_module": holding}
    return {node for node in order if str(node.target) in uses.get(node.op, ())} - {source}
