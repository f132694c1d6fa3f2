"""Attention whose key heads the ranks cannot share out, thought of as attention with more of them.

With 4 query and 2 key heads on 4 ranks, each key head is held twice. That is a model of 4 key heads, in which each stands twice
and serves half as many queries; this one can be split like any other. The model is traced as if it were that: key projections
are wider for a moment, counts of keys and groups say so, and every rank's model has to be its part of what is traced.

That both compute the same is shown as well. They take the same steps, but for those that only move data, as repeating the keys.
A dry run on as many ranks as there are key heads shows which queries meet which key, in the model as it is and in the wide one.
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
from ..dry_run.fused_sizes import fused_sizes
from ..dry_run.split_specs import Split
from ..local_sizes.local_attributes import literals
from .layer_search import Derived

_MOVES = ("getitem", "unsqueeze", "expand", "reshape", "view", "flatten", "contiguous", "repeat_interleave", "split", "chunk")


@dataclass(frozen=True)
class KeyCopies:
    """An attention module of whose key heads ranks hold copies.

    Args:
        owner: The attention module.
        heads: What it has.
        wide: What it has when each copy counts.
        blocks: Path of each projection that makes heads, to the widths of its blocks.
    """

    owner: nn.Module
    heads: attention_heads.Heads
    wide: attention_heads.Heads
    blocks: Mapping[str, tuple[int, ...]]

    def wide_blocks(self, path: str) -> tuple[int, ...]:
        """Widths of the blocks of a projection when each copy counts."""
        return attention_heads.blocks_with_key_heads(path.rpartition(".")[2], self.blocks[path], self.wide)

    def split_by(self, splits: Mapping[str, Split]) -> bool:
        """Return whether a plan splits all of the projections by heads."""
        return all(path in splits and splits[path].output == "sharded" for path in self.blocks)


def key_copies(root: nn.Module, traced: fx.GraphModule, num_shards: int) -> list[KeyCopies]:
    """The attention modules of a model and its graph that want copies of keys."""
    calls: dict[str, list[fx.Node]] = {}
    for node in traced.graph.find_nodes(op="call_module"):
        calls.setdefault(str(node.target), []).append(node)
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for path, nodes in calls.items():
        owner, _, child = path.rpartition(".")
        if owner and attention_heads.makes_heads(root.get_submodule(owner), child):
            blocks = fused_sizes(nodes) if attention_heads.may_be_fused(child) else ()
            groups.setdefault(owner, {})[path] = blocks or (int(nodes[0].meta["val"].shape[-1]),)
    found = (_key_copies(root.get_submodule(owner), blocks, num_shards) for owner, blocks in groups.items())
    return [each for each in found if each is not None]


def _key_copies(owner: nn.Module, blocks: dict[str, tuple[int, ...]], num_shards: int) -> KeyCopies | None:
    each = [attention_heads.copied_heads(owner, path.rpartition(".")[2], sizes, num_shards) for path, sizes in blocks.items()]
    heads = each[0]
    if heads is None or any(other != heads for other in each):
        return None
    return KeyCopies(owner, heads, heads._replace(keys=heads.local(num_shards).keys * num_shards), blocks)


@contextmanager
def widened(root: nn.Module, copies: Iterable[KeyCopies], rules: Rulebook) -> Iterator[None]:
    """Let the attention modules be those in which each copy counts; what is added to their weights has no memory."""
    with ExitStack() as stack:
        for each in copies:
            stack.enter_context(_with(each.owner, attention_heads.key_counts(each.owner, each.heads, each.wide)))
            for path in each.blocks:
                module = root.get_submodule(path)
                cut = rules.layer_cut(module, "sharded")
                assert cut is not None
                stack.enter_context(_resized(module, cut, sum(each.blocks[path]), sum(each.wide_blocks(path))))
        yield


@contextmanager
def _with(module: nn.Module, values: Mapping[str, int]) -> Iterator[None]:
    kept = {name: module.__dict__[name] for name in values}
    module.__dict__.update(values)
    try:
        yield
    finally:
        module.__dict__.update(kept)


@contextmanager
def _resized(module: nn.Module, cut: Cut, old: int, new: int) -> Iterator[None]:
    """Let a layer have another width, its parameters one number that stands everywhere."""
    kept = dict(module._parameters)
    with _with(module, {name: new for name in cut.attributes if module.__dict__.get(name) == old}):
        for name, dim in cut.dims.items():
            if (given := kept.get(name)) is not None and old != new:
                shape = [*given.shape[:dim], new, *given.shape[dim + 1 :]]
                one = torch.empty((1,) * len(shape), dtype=given.dtype, device=given.device)
                module._parameters[name] = nn.Parameter(one.expand(shape), requires_grad=given.requires_grad)
        try:
            yield
        finally:
            module._parameters.update(kept)


def unshown(
    copies: list[KeyCopies], traced: fx.GraphModule, wide: fx.GraphModule, derived: Derived, rederive: Callable[..., Derived]
) -> list[KeyCopies]:
    """Those that a plan for the wide model does not split, or of which it is not shown that the model computes the same.

    Args:
        copies: The attention modules.
        traced: The model as it is.
        wide: The model traced inside ``widened``; still there.
        derived: The plan for it.
        rederive: Makes the plan of a graph for a mesh.
    """
    if not copies or list(_steps(traced.graph)) != list(_steps(wide.graph)):
        return copies
    failed = [each for each in copies if not each.split_by(derived.splits)]
    for graph, heads in ((traced, "heads"), (wide, "wide")):
        for size in sorted({getattr(each, heads).keys for each in copies} - {1, derived.layouts.mesh.size()}):
            splits = rederive(graph, fake_mesh(size)).splits
            failed += [each for each in copies if getattr(each, heads).keys == size and not each.split_by(splits)]
    return failed


def narrow(derived: Derived, copies: Iterable[KeyCopies]) -> None:
    """Let a plan for the wide model be one for the model as it is."""
    for each in copies:
        for path, blocks in each.blocks.items():
            if derived.splits[path].blocks:
                derived.splits[path] = replace(derived.splits[path], blocks=blocks)


def _steps(graph: fx.Graph) -> Iterator[tuple[str, str, list[object]]]:
    """Iterate over the steps of a graph, without those that only move data."""
    for node in graph.nodes:
        if node.op.startswith("call") and node.target is not expect and function_name(node) not in _MOVES:
            kwargs = {name: value for name, value in node.kwargs.items() if name != "enable_gqa"}  # it repeats keys itself
            yield node.op, str(node.target), literals(node.args, kwargs)
