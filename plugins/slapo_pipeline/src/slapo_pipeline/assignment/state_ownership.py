"""Owners of the buffers and parameters that a forward changes: one stage each, as every rank has its own copy."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import fx, nn

from slapo_core import TraceError

from .node_assignment import Assignment


class StateOwnership:
    """The stages that change and that use each buffer and parameter, over all programs of one model."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._changed: dict[str, set[int]] = {}
        self._used: dict[str, set[int]] = {}
        self._weights: dict[str, str] = {}
        self._held: list[set[str]] = []

    def check_weight_owners(self, used: Sequence[set[str]], keep: Sequence[set[str]]) -> None:
        """Record the weights that each stage of the first program holds (``keep``); refuse a later program that needs others.

        Raises:
            TraceError: a stage uses a weight that another stage holds.
        """
        if not self._held:
            names = self._names()
            tensors = [*self._root.named_parameters(remove_duplicate=False), *self._root.named_buffers(remove_duplicate=False)]
            self._weights = {path: names[id(t)] for path, t in tensors if isinstance(t, nn.Parameter) or t.is_meta}
            self._held = [self._weights_in(paths) for paths in keep]
        for stage, paths in enumerate(used):
            for name in sorted(self._weights_in(paths) - self._held[stage]):
                holders = {index for index, held in enumerate(self._held) if name in held}
                mode = "train" if self._root.training else "eval"
                raise TraceError(
                    f"stage {stage} uses {name!r} on these inputs in {mode} mode, but the "
                    f"first plan left it with {_stages(holders)}; build in a mode and with example inputs that use it"
                )

    def _weights_in(self, paths: set[str]) -> set[str]:
        around = {place: {place[:end] for end, letter in enumerate(f"{place}.") if letter == "."} for place in self._weights}
        return {name for place, name in self._weights.items() if not paths.isdisjoint(around[place])}

    def check(self, assignment: Assignment) -> None:
        """Record the stages that use and change each tensor in one more program.

        Raises:
            TraceError: one stage changes a tensor that another stage uses other than as a received value.
        """
        names = self._names()
        changed, used = copy.deepcopy((self._changed, self._used))
        for stage, nodes in enumerate(assignment.nodes):
            for node in nodes:
                for name in self._accessed_state(node, names):
                    used.setdefault(name, set()).add(stage)
                for name in self._written(node, assignment, names):
                    changed.setdefault(name, set()).add(stage)
        for name, by in changed.items():
            if len(everywhere := by | used.get(name, set())) > 1:
                raise TraceError(
                    f"{name!r} is changed in {_stages(by)} and used in {_stages(everywhere)}, which have a copy each; "
                    "cut so that one stage uses it"
                )
        self._changed, self._used = changed, used

    def _names(self) -> dict[int, str]:
        """Return one name per tensor, even if it is registered at several paths."""
        root = self._root
        named = [*root.named_buffers(), *root.named_parameters()]
        return {id(tensor): name for name, tensor in named}

    def _accessed_state(self, node: fx.Node, names: dict[int, str]) -> set[str]:
        if node.op == "get_attr":
            name = self._name(str(node.target), names)
            return {name} if name in names.values() else set()
        if node.op == "call_module":
            module = self._root.get_submodule(str(node.target))
            return {names[id(tensor)] for tensor in [*module.buffers(), *module.parameters()]}
        return set()

    def _name(self, place: str, names: dict[int, str]) -> str:
        """Return the name that ``names`` has for the tensor at ``place``, or ``place`` if that is no such tensor."""
        path, _, name = place.rpartition(".")
        return names.get(id(getattr(self._root.get_submodule(path), name, None)), place)

    def _written(self, node: fx.Node, assignment: Assignment, names: dict[int, str]) -> set[str]:
        touched = assignment.aliases.memory_mutated_by([node])
        reads = [read for read in assignment.aliases.reads if touched & assignment.aliases.memory_of(read)]
        written = {name for read in reads for name in self._accessed_state(read, names)}
        return written | {self._name(place, names) for place in node.meta.get("changes", ())}


def _stages(numbers: set[int]) -> str:
    return ("stages " if len(numbers) > 1 else "stage ") + " and ".join(map(str, sorted(numbers)))
