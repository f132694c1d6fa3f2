"""Parallel branches of a forward, such as attention heads in a list.

``torch.cat`` or ``torch.stack`` joins the results of branches. A branch is the set of nodes that only its result needs. Each
rank can run some of the branches, holding the parameters that they alone use. The joined result is then sharded along the
dimension of the join.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from slapo_tracing.nodes import function_name

from ...splitting.module_paths import without_block_numbers
from .node_values import has_gradient, returns_several_tensors
from .split_specs import ParameterSplit

_JOINTS = ("cat", "concat", "concatenate", "stack")


@dataclass(frozen=True, eq=False)
class Branches:
    """Branches whose results one node joins.

    Args:
        joint: Node that joins the results.
        dim: Dimension of the joined result along which the branches lie.
        nodes: Nodes of each branch.
        parameters: Names of the parameters that each branch alone uses.
        entries: Nodes outside that return several tensors to branches, as ``chunk`` does.
        shared: Modules that all branches call, to the names of their parameters.
    """

    joint: fx.Node
    dim: int
    nodes: tuple[frozenset[fx.Node], ...]
    parameters: tuple[frozenset[str], ...]
    entries: frozenset[fx.Node]
    shared: dict[fx.Node, list[str]]

    def owner(self, index: int, ranks: int) -> int:
        """Return the rank that runs a branch."""
        return index * ranks // len(self.nodes)

    def splits(self, ranks: int) -> dict[str, ParameterSplit]:
        """Return the split of each parameter of the branches: whole on the rank that runs its branch."""
        owners = ((names, self.owner(index, ranks)) for index, names in enumerate(self.parameters))
        return {name: ParameterSplit(0, owner=owner) for names, owner in owners for name in names}

    @cached_property
    def all_nodes(self) -> frozenset[fx.Node]:
        """Return the nodes of all branches and their entries."""
        return frozenset[fx.Node]().union(self.entries, *self.nodes)

    def external_inputs(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the inputs of a branch node that come from outside the branches."""
        return (other for other in node.all_input_nodes if other not in self.all_nodes)


def find_branches(graph: fx.Graph, root: nn.Module, ranks: int, without: Collection[str] = ()) -> list[Branches]:
    """Return the branches that the ranks can run in equal numbers, without the modules and parameters that stay whole."""
    finder = _Finder(graph, root, without)
    joints = [node for node in graph.nodes if node.op == "call_function" and function_name(node) in _JOINTS]
    found = [finder.branches(node, ranks) for node in joints]
    return [each for each in found if each is not None]


class _Finder:
    def __init__(self, graph: fx.Graph, root: nn.Module, without: Collection[str]) -> None:
        self._graph, self._root, self._without = graph, root, without
        self._memories: dict[Any, set[fx.Node]] = {}
        self._uses: dict[int, set[fx.Node]] = {}
        self._names: dict[fx.Node, list[str]] = {}
        named = dict(root.named_parameters(remove_duplicate=False))
        for node in graph.nodes:
            self._memories.setdefault(node.meta.get("memory"), set()).add(node)
            target = str(node.target)
            if node.op == "get_attr":
                self._names[node] = [target] if target in named else []
            elif node.op == "call_module":
                own = root.get_submodule(target).named_parameters(remove_duplicate=False)
                self._names[node] = [f"{target}.{name}" for name, _ in own]
            for name in self._names.get(node, ()):
                self._uses.setdefault(id(named[name]), set()).add(node)
        self._named = named

    def branches(self, joint: fx.Node, ranks: int) -> Branches | None:
        """Return the branches that a node joins, or None if ranks cannot run some each."""
        given, dim = _joined_values(joint)
        if len(given) < ranks or len(given) % ranks or len({*given}) < len(given):
            return None
        if any(list(other.users) != [joint] for other in given) or len({other.meta["val"].shape for other in given}) > 1:
            return None
        nodes = self._closures(given)
        entries = self._entries(nodes)
        found = self._tensors(nodes)
        if found is None:
            return None
        own, shared = found
        branches = Branches(joint, dim, nodes, own, entries, shared)
        kinds = {frozenset(map(without_block_numbers, names)) for names in own}
        return branches if own[0] and len(kinds) == 1 and self._can_be_left_out(branches) else None

    def _closures(self, results: list[fx.Node]) -> tuple[frozenset[fx.Node], ...]:
        """Return the nodes that only one result needs; a node without users belongs to the branch of its inputs."""
        branch_of = dict(zip(results, range(len(results)), strict=True))
        changed = True
        while changed:
            changed = False
            for node in reversed(self._graph.nodes):
                if node in branch_of or node.op in ("placeholder", "output"):
                    continue
                beside = node.users or [other for other in node.all_input_nodes if other in branch_of]
                numbers = {branch_of.get(other, -1) for other in beside}
                if len(numbers) == 1 and -1 not in numbers:
                    branch_of[node], changed = numbers.pop(), True
        return tuple(frozenset(node for node, number in branch_of.items() if number == index) for index in range(len(results)))

    def _entries(self, nodes: tuple[frozenset[fx.Node], ...]) -> frozenset[fx.Node]:
        inside = frozenset[fx.Node]().union(*nodes)
        given = {other for node in inside for other in node.all_input_nodes} - inside
        return frozenset(node for node in given if returns_several_tensors(node) and inside.issuperset(node.users))

    def _tensors(
        self, nodes: tuple[frozenset[fx.Node], ...]
    ) -> tuple[tuple[frozenset[str], ...], dict[fx.Node, list[str]]] | None:
        """Return the parameters of each branch and those that all share; None if a parameter is neither."""
        own, shared = [], dict[fx.Node, list[str]]()
        inside = frozenset[fx.Node]().union(*nodes)
        for each in nodes:
            names = {name: node for node in each for name in self._names.get(node, ())}
            if any(name == path or name.startswith(f"{path}.") for name in names for path in self._without):
                return None
            alone = {name for name in names if self._uses[id(self._named[name])] <= each}
            if any(not self._named[name].dim() for name in alone):
                return None
            own.append(frozenset(alone))
            for name in names.keys() - alone:
                uses = self._uses[id(self._named[name])]
                if any(uses.isdisjoint(other) for other in nodes) or not uses <= inside:
                    return None
                if names[name].op == "call_module":
                    shared.setdefault(names[name], []).append(name)
        return tuple(own), shared

    def _can_be_left_out(self, branches: Branches) -> bool:
        """Return whether a branch can be skipped: it writes nothing outside, and all branches have the same outside inputs."""
        for node in branches.all_nodes:
            if node.op == "call_module" and any(True for _ in self._root.get_submodule(str(node.target)).buffers()):
                return False
            for place in node.meta.get("mutates") or ():
                written = self._memories[node.all_input_nodes[place].meta.get("memory")]
                if any(other not in branches.all_nodes or other.op == "get_attr" for other in written):
                    return False
            if any(returns_several_tensors(other) for other in branches.external_inputs(node)):
                return False
        uses = [{other for node in each for other in self._outside_values(node, branches)} for each in branches.nodes]
        return all(other in each for other in set[fx.Node]().union(*uses) for each in uses)

    def _outside_values(self, node: fx.Node, branches: Branches) -> Iterable[fx.Node]:
        """Yield the outside values with gradients that a node uses, directly or through an entry."""
        for other in node.all_input_nodes:
            if other in branches.entries:
                yield from self._outside_values(other, branches)
            elif other not in branches.all_nodes and has_gradient(other):
                yield other


def _joined_values(joint: fx.Node) -> tuple[list[fx.Node], int]:
    """Return the joined tensors and the dimension of the join; no tensors if the node joins none."""
    values: Any = joint.args[0] if joint.args else joint.kwargs.get("tensors", ())
    dim = joint.args[1] if len(joint.args) > 1 else joint.kwargs.get("dim", joint.kwargs.get("axis", 0))
    result = joint.meta.get("val")
    is_plain = isinstance(values, list | tuple) and all(
        isinstance(each, fx.Node) and isinstance(each.meta.get("val"), torch.Tensor) for each in values
    )
    if not is_plain or not isinstance(result, torch.Tensor) or not isinstance(dim, int):
        return [], 0
    return [*values], dim % result.dim()
