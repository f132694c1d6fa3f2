"""Column-parallel layers that use the same value sum its gradient together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from slapo_core import Schedule


def reduce_shared_gradients(schedule: Schedule, paths: Sequence[str]) -> None:
    """Sum the gradients of the inputs of column-parallel layers that are given one tensor, mostly."""
    if len(paths) == 1:
        (schedule[paths[0]] if paths[0] else schedule).sync("bwd_post", "all_reduce")
        return
    owner = _common_parent(paths)
    start = len(owner) + 1 if owner else 0
    (schedule[owner] if owner else schedule).sync("bwd_post", "all_reduce", of=[path[start:] for path in paths])


def group_by_parent(paths: Iterable[str]) -> list[list[str]]:
    """Layers of one module in one group each, where only the names are known."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(path.rpartition(".")[0], []).append(path)
    return list(groups.values())


def group_by_input(graph: fx.Graph, paths: Iterable[str]) -> list[list[str]]:
    """Layers that are given the same value of a graph in one group each."""
    wanted, groups = set(paths), dict[fx.Node, list[str]]()
    for node in graph.nodes:
        if node.op == "call_module" and node.target in wanted:
            wanted.discard(node.target)  # a layer that is called again stays where it was first
            groups.setdefault(node.all_input_nodes[0], []).append(str(node.target))
    return list(groups.values())


def _common_parent(paths: Sequence[str]) -> str:
    """Path of the innermost module around all."""
    common: list[str] = []
    for names in zip(*(path.split(".")[:-1] for path in paths), strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)
