"""Attention with fewer key heads than ranks, split as an attention in which each copy of a key head is a head.

With 4 query heads and 2 key heads on 4 ranks, two ranks hold each key head. That equals a model of 4 key heads in which each
is there twice and serves half as many queries. Such a model can be split like any other. The model is traced as that one: for
a moment key projections are wider, and counts of keys and groups match. Every rank's model has to be its shard of that trace.

The equality is verified. Both graphs must have the same operations, except for those that only move data, such as the
repetition of keys. A dry run of both on as many ranks as there are key heads shows which queries meet which key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from slapo_tracing.nodes import expect, function_name

from ...communication._torch_private import fake_mesh
from ...rules.rulebook import Rulebook
from ...rules.sharding_rule import Cut
from ...splitting import attention_heads
from ..dry_run.node_values import calls_by_path
from ..dry_run.split_specs import LayerSplit, fused_sizes
from ..local_sizes.local_attributes import literals
from .layer_search import DerivedPlan

_DATA_MOVEMENT = "getitem unsqueeze expand reshape view flatten contiguous repeat_interleave split chunk".split()


@dataclass(frozen=True)
class ReplicatedKeyHeads:
    """Attention module with key heads that several ranks hold.

    Args:
        owner: Attention module with ``heads``.
        wide: Numbers of heads if each copy counts.
        blocks: Path of each projection into heads, to the widths of its blocks.
    """

    owner: nn.Module
    heads: attention_heads.Heads
    wide: attention_heads.Heads
    blocks: Mapping[str, tuple[int, ...]]

    def split_by(self, splits: Mapping[str, LayerSplit]) -> bool:
        """Return whether a plan splits all of the projections by heads."""
        return all(path in splits and splits[path].output == "sharded" for path in self.blocks)


def find_key_heads(root: nn.Module, traced: fx.GraphModule, num_shards: int) -> list[ReplicatedKeyHeads]:
    """Return the attention modules in a graph that need replicated key heads."""
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for path, nodes in calls_by_path(traced.graph).items():
        owner, _, child = path.rpartition(".")
        if owner and attention_heads.makes_heads(root.get_submodule(owner), child):
            blocks = fused_sizes(nodes) if child in attention_heads.FUSED else ()
            groups.setdefault(owner, {})[path] = blocks or (int(nodes[0].meta["val"].shape[-1]),)
    found = (_replicated_key_heads(root.get_submodule(owner), blocks, num_shards) for owner, blocks in groups.items())
    return [each for each in found if each is not None]


def _replicated_key_heads(owner: nn.Module, blocks: dict[str, tuple[int, ...]], num_shards: int) -> ReplicatedKeyHeads | None:
    each = [attention_heads.copied_heads(owner, path.rpartition(".")[2], sizes, num_shards) for path, sizes in blocks.items()]
    heads = each[0]
    if heads is None or any(other != heads for other in each):
        return None
    return ReplicatedKeyHeads(owner, heads, heads._replace(keys=heads.local(num_shards).keys * num_shards), blocks)


@contextmanager
def with_replicated_heads(root: nn.Module, copies: Iterable[ReplicatedKeyHeads], rules: Rulebook) -> Iterator[None]:
    """Change the attention modules so that each copy of a key head counts; the wider weights use no memory."""
    with ExitStack() as stack:
        for each in copies:
            stack.enter_context(_with_attributes(each.owner, attention_heads.key_counts(each.owner, each.heads, each.wide)))
            for path in each.blocks:
                module = root.get_submodule(path)
                cut = rules.layer_cut(module, "sharded")
                assert cut is not None
                wide = attention_heads.blocks_with_key_heads(path.rpartition(".")[2], each.blocks[path], each.wide)
                stack.enter_context(_with_width(module, cut, sum(each.blocks[path]), sum(wide)))
        yield


@contextmanager
def _with_attributes(module: nn.Module, values: Mapping[str, int]) -> Iterator[None]:
    kept = {name: module.__dict__[name] for name in values}
    module.__dict__.update(values)
    try:
        yield
    finally:
        module.__dict__.update(kept)


@contextmanager
def _with_width(module: nn.Module, cut: Cut, old: int, new: int) -> Iterator[None]:
    """Give a layer another width; each new parameter is a single number, expanded."""
    kept = dict(module._parameters)
    with _with_attributes(module, {name: new for name in cut.attributes if module.__dict__.get(name) == old}):
        for name, dim in cut.dims.items():
            if (given := kept.get(name)) is not None and old != new:
                shape = [*given.shape[:dim], new, *given.shape[dim + 1 :]]
                one = torch.empty((1,) * len(shape), dtype=given.dtype, device=given.device)
                module._parameters[name] = nn.Parameter(one.expand(shape), requires_grad=given.requires_grad)
        try:
            yield
        finally:
            module._parameters.update(kept)


def unverified_attentions(
    copies: list[ReplicatedKeyHeads],
    traced: fx.GraphModule,
    wide: fx.GraphModule,
    derived: DerivedPlan,
    rederive: Callable[..., DerivedPlan],
) -> list[ReplicatedKeyHeads]:
    """Return the attentions of ``copies`` that the wide plan does not split, or whose equality to it was not verified.

    ``traced`` is the graph of the model as it is; ``wide`` was traced inside ``with_replicated_heads``, which is still active,
    and ``derived`` is its plan. ``rederive`` returns the plan of a graph for a mesh.
    """
    if not copies or list(_operations(traced.graph)) != list(_operations(wide.graph)):
        return copies
    failed = [each for each in copies if not each.split_by(derived.splits)]
    for graph, heads in ((traced, "heads"), (wide, "wide")):
        # one rank shows nothing, and the plan itself is the dry run on all ranks
        for size in sorted({getattr(each, heads).keys for each in copies} - {1, derived.layouts.mesh.size()}):
            splits = rederive(graph, fake_mesh(size)).splits
            failed += [each for each in copies if getattr(each, heads).keys == size and not each.split_by(splits)]
    return failed


def restore_key_heads(derived: DerivedPlan, copies: Iterable[ReplicatedKeyHeads]) -> None:
    """Change a plan for the wide model into one for the model as it is."""
    for each in copies:
        for path, blocks in each.blocks.items():
            if derived.splits[path].blocks:
                derived.splits[path] = replace(derived.splits[path], blocks=blocks)


def _operations(graph: fx.Graph) -> Iterator[tuple[str, str, list[object]]]:
    """Yield the operations of a graph, without those that only move data."""
    for node in graph.nodes:
        if node.op.startswith("call") and node.target is not expect and function_name(node) not in _DATA_MOVEMENT:
            kwargs = {name: value for name, value in node.kwargs.items() if name != "enable_gqa"}  # it repeats keys itself
            yield node.op, str(node.target), literals(node.args, kwargs)
