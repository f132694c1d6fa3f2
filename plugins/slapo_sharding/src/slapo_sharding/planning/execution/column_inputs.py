"""Shared reduction of the input gradient of column-parallel layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from slapo_core import Schedule


def reduce_shared_gradients(schedule: Schedule, paths: Sequence[str]) -> None:
    """Reduce the gradients of the inputs of column-parallel layers, which share one tensor in most cases."""
    if len(paths) == 1:
        (schedule[paths[0]] if paths[0] else schedule).sync("bwd_post", "all_reduce")
        return
    owner = _common_parent(paths)
    start = len(owner) + 1 if owner else 0
    (schedule[owner] if owner else schedule).sync("bwd_post", "all_reduce", of=[path[start:] for path in paths])


def group_by_parent(paths: Iterable[str]) -> list[list[str]]:
    """Group layers by parent module, for plans that have paths alone."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(path.rpartition(".")[0], []).append(path)
    return list(groups.values())


def group_by_input(graph: fx.Graph, paths: Iterable[str]) -> list[list[str]]:
    """Group layers by the input that they have in a graph."""
    wanted, groups = set(paths), dict[fx.Node, list[str]]()
    for node in graph.nodes:
        if node.op == "call_module" and node.target in wanted:
            wanted.discard(node.target)  # a layer with several calls belongs to its first input
            groups.setdefault(node.all_input_nodes[0], []).append(str(node.target))
    return list(groups.values())


def _common_parent(paths: Sequence[str]) -> str:
    """Return the path of the innermost module that contains all of these."""
    common: list[str] = []
    for names in zip(*(path.split(".")[:-1] for path in paths), strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)
