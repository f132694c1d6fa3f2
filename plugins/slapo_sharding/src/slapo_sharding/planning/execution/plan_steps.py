"""Steps of a plan: stacked experts, parameters that forwards use directly, and shared reductions of input gradients."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import fx, nn

from slapo_core import Schedule, ShardSpec
from slapo_training.gradient_hooks import move_hooks

from ...rules.rulebook import rules_of
from ...rules.sharding_rule import AppliedCut, Cut, record_cut
from ...splitting import persistent_hooks
from ...splitting.shard_step import local_shard
from ..dry_run.layouts import Layouts
from ..dry_run.node_values import calls_by_path
from ..dry_run.split_specs import ParameterSplit
from ..local_sizes.adapted_modules import is_inside


def split_stack(schedule: Schedule) -> None:
    """Split stacked experts, and reduce their output and the gradient of their inputs."""
    cut = rules_of(schedule).stack_cut(schedule.mod)
    assert cut is not None
    name = cut.main_parameter(schedule.mod)
    schedule.shard(name, axis=cut.dims[name])
    schedule.sync("bwd_post", "all_reduce").sync("fwd_post", "all_reduce")


def fork_stack(schedule: Schedule) -> None:
    """Fork the random numbers of stacked experts that have a dropout."""
    cut = rules_of(schedule).stack_cut(schedule.mod)
    if cut is not None and cut.draws and getattr(schedule.mod, "dropout", False):
        schedule.fork_rng()


def unused_entries(root: nn.Module, layouts: Layouts, path: str) -> Iterator[str]:
    """Yield the entries of an ``nn.ModuleDict`` beside the module at ``path``, of its class, that did not run as it did.

    A model selects an entry by name, such as the adapter of a projection.
    """
    owner, _, name = path.rpartition(".")
    table = root.get_submodule(owner)
    if path and isinstance(table, nn.ModuleDict):
        called = calls_by_path(layouts.graph)
        for other, module in table.items():
            has_run = any(is_inside(each, f"{owner}.{other}") for each in called)
            if type(module) is type(table[name]) and not has_run:
                yield f"{owner}.{other}"


def split_parameters(schedule: Schedule, splits: Mapping[str, ParameterSplit]) -> None:
    """Shard or distribute parameters that the forward of a module uses directly, as in ``x @ self.w``.

    The module runs from a graph that reduces the results. It is recorded as split with whole inputs and outputs. Checks of its
    inside were made by the dry run.
    """
    size, rank = schedule.world_size, schedule.rank
    spec = ShardSpec(0, (size,), rank, size, (size,), schedule.group)
    for path, split in splits.items():
        below, _, name = path.rpartition(".")
        handle = schedule[below] if below else schedule
        tensor: nn.Parameter = handle.mod._parameters[name]  # type: ignore[assignment]
        shape, dealt = tuple(tensor.shape), None
        if split.owner is not None:
            dealt = tuple(((0, shape[split.dim] if each == split.owner else 0),) for each in range(size))
        spec = ShardSpec(split.dim, shape, rank, size, split.blocks or (shape[split.dim],), schedule.group, uneven_ranges=dealt)
        schedule.touch(handle.mod)
        handle.set_parameter(name, new := local_shard(tensor, spec))
        move_hooks(new, tensor, spec, handle.places_of(new, (handle.mod, name)))
        persistent_hooks.keep_facts(handle.mod)
    schedule.touch(schedule.mod)
    cut = Cut({path: split.dim for path, split in splits.items()}, "whole", "whole")
    record_cut(schedule.mod, AppliedCut(cut, spec, asked=tuple(splits)))


def reduce_shared_gradients(schedule: Schedule, paths: Sequence[str]) -> None:
    """Reduce the gradients of the inputs of column-parallel layers, which share one tensor in most cases."""
    if len(paths) == 1:
        (schedule[paths[0]] if paths[0] else schedule).sync("bwd_post", "all_reduce")
        return
    owner = ".".join(os.path.commonprefix([path.split(".")[:-1] for path in paths]))
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
