"""Validity of a program: the same modules are inlined, and the forward takes the same branches on a batch's values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from slapo_tracing.graphs import TracedModule
from slapo_tracing.nodes import compile_graph, expect, is_mode_node

from ..assignment.alias_analysis import AliasAnalysis, with_sources

_Path = tuple[str, ...]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_modules", "_parameters", "_buffers")


class InlinedModules:
    """The hooks, wrappers, modules and tensors of a model at the time it was cut.

    The modules around the inlined ``paths`` are inlined, too.
    """

    def __init__(
        self, root: nn.Module, paths: Iterable[str], used: Sequence[Collection[str]], stages: Sequence[nn.Module]
    ) -> None:
        inlined = [tuple(path.split(".")) if path else () for path in paths]
        around = {path[:depth] for path in inlined for depth in range(len(path) + 1)}
        self._wrapping = {path: _forward_and_hooks(_module_at(root, path)) for path in around}
        self._used: list[tuple[nn.Module, dict[_Path, list[str]]]] = []
        for names, stage in zip(used, stages, strict=True):
            self._used.append((stage, {}))
            for target in sorted(names):
                *outer, name = target.split(".")
                here, there = (_member(_module_at(tree, tuple(outer)), name) for tree in (root, stage))
                if here is there:  # no constant of the graph
                    self._used[-1][1].setdefault(tuple(outer), []).append(name)

    def wrapping_changed(self, root: nn.Module) -> bool:
        """Return whether an inlined module gained or lost a hook or wrapper."""
        return any(_forward_and_hooks(_module_at(root, path)) != before for path, before in self._wrapping.items())

    def has_replaced_members(self, root: nn.Module) -> bool:
        """Return whether a module, parameter or buffer of the model is no longer the one a stage has.

        An engine replaces a member in both, which is not a difference.
        """
        return any(
            _member(held, name) is not _member(holds, name)
            for stage, holders in self._used
            for path, names in holders.items()
            for held, holds in [(_module_at(root, path), _module_at(stage, path))]
            for name in names
        )


def _module_at(root: nn.Module, path: _Path) -> nn.Module | None:
    module: nn.Module | None = root
    for name in path:
        module = module and module._modules.get(name)
    return module


def _member(module: nn.Module | None, name: str) -> Any:
    state = vars(module) if module is not None else {}
    return next((state[table][name] for table in _TABLES if name in state.get(table, ())), None)


def _forward_and_hooks(module: nn.Module | None) -> Any:
    state = vars(module) if module is not None else {}
    return state.get("forward"), [list(state.get(table, ())) for table in _HOOKS]


class ValueGuard:
    """Values of the batch that a forward's Python code read during the trace.

    They are recomputed by the nodes that need the batch alone: no parameter, buffer or module. A stage checks the other
    values when it runs.
    """

    def __init__(self, traced: TracedModule, root: nn.Module) -> None:
        self._run: Callable[..., None] | None = None
        self._names: list[str] = []
        nodes = _batch_only_checks(traced.graph, root)
        if nodes:
            self._build(traced, nodes)

    def _build(self, traced: TracedModule, nodes: list[fx.Node]) -> None:
        graph, aliases = fx.Graph(), AliasAnalysis(nodes)
        env: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            copied = env[node] = graph.node_copy(node, env.__getitem__)
            if node.op == "placeholder":
                self._names.append(str(node.target))
                copied.args = ()
            if node.op in ("placeholder", "get_attr") and aliases.mutations_of(node):
                env[node] = graph.call_method("clone", (copied,))  # the batch is the caller's
        graph.output(None)
        constants = {str(node.target): getattr(traced, str(node.target)) for node in nodes if node.op == "get_attr"}
        self._run = partial(compile_graph(graph, "value conditions")[0], SimpleNamespace(**constants))

    def accepts(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the values are the same for a batch of the same shapes."""
        if self._run is None:
            return True
        try:
            with torch.no_grad():
                self._run(*(inputs[name] for name in self._names))
        except Exception:  # another value, or an operation that is valid for the traced values alone
            return False
        return True


def _batch_only_checks(graph: fx.Graph, root: nn.Module) -> list[fx.Node]:
    """Return the checks that the batch alone decides, with all nodes they need, in order."""
    order = [node for node in graph.nodes if not is_mode_node(node)]
    own: set[fx.Node] = set()
    for node in order:
        if _is_batch_only(node, root) and own.issuperset(node.all_input_nodes):
            own.add(node)
    aliases = AliasAnalysis(order)
    found: set[fx.Node] = set()
    for check in order:
        if check in own and check.target is expect:
            needs = _sources_and_mutations(check, aliases, order)
            found |= needs if needs <= own else set()
    return [node for node in order if node in found]


def _is_batch_only(node: fx.Node, root: nn.Module) -> bool:
    if node.op == "get_attr":
        return "." not in str(node.target) and not hasattr(root, str(node.target))
    return node.op in ("placeholder", "call_function", "call_method") and not node.meta.get("draws")


def _sources_and_mutations(check: fx.Node, aliases: AliasAnalysis, order: list[fx.Node]) -> set[fx.Node]:
    """Return a node, its sources, and the nodes that changed any of them in place before it."""
    before = {*itertools.takewhile(lambda node: node is not check, order)}
    return with_sources([check], lambda node: [*node.all_input_nodes, *before.intersection(aliases.mutations_of(node))])
