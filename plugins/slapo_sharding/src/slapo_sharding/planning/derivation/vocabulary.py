"""Embeddings and heads whose vocabulary is split: those that the model names, or that its graph shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from slapo_tracing.nodes import function_name

from ...communication.shard_ranges import shard_range
from ...rules.rulebook import Rulebook
from ..dry_run.layouts import Layouts
from ..dry_run.node_values import calls_by_path
from .replicated_matmuls import MATMULS


def vocabulary_steps(model: nn.Module, num_shards: int, rules: Rulebook) -> list[tuple[str, str]]:
    """Return paths and styles of the embedding and the head if rules can split the vocabulary.

    Layers tied to them are split alike, or all of them stay whole. Without a head, the embedding stays whole, as its weight
    may serve as one.
    """
    named = dict(model.named_modules())
    found = [module for module in vocabulary_modules(model) if any(module is other for other in named.values())]
    if len(found) < 2:
        return []
    steps: dict[str, str] = {}
    for module in found:
        tied = _tied_modules(named, module)
        if all(_is_divisible(other, num_shards, rules) for other in tied.values()):
            steps.update((path, _style(other)) for path, other in tied.items())
    return list(steps.items())


def vocabulary_steps_from_graph(layouts: Layouts, model: nn.Module, num_shards: int, rules: Rulebook) -> dict[str, str]:
    """Return paths and styles of embeddings and heads that no method of the model names, found in the graph.

    They are an embedding of ids, and a layer with one row per id whose result enters no other weight. Both have whole inputs
    and outputs, and nothing but their calls uses their weights.
    """
    named = dict(model.named_modules())
    calls = {path: nodes for path, nodes in calls_by_path(layouts.graph).items() if path not in layouts.splits}
    read = {str(node.target).rpartition(".")[0] for node in layouts.graph.find_nodes(op="get_attr")}
    split = {*layouts.local_shapes, *layouts.partial_gradients, *layouts.replicated_parts}
    whole = [path for path, nodes in calls.items() if _has_rows(named[path]) and split.isdisjoint(nodes)]
    tables = [path for path in whole if isinstance(named[path], nn.Embedding)]
    layers = [path for path in whole if rules.is_layer(named[path], "sharded")]
    heads = [path for path in layers if not any(_feeds_matmul(each, model) for each in calls[path])]
    sizes = set.intersection(*({len(named[path].weight) for path in paths} for paths in (tables, heads)))
    steps: dict[str, str] = {}
    for path in (path for path in (*tables, *heads) if len(named[path].weight) in sizes):
        tied = _tied_modules(named, named[path])
        used_by_calls = calls.keys() >= tied.keys() and read.isdisjoint(tied)
        if used_by_calls and all(_is_divisible(each, num_shards, rules) for each in tied.values()):
            steps.update((other, _style(module)) for other, module in tied.items())
    return steps


def _style(module: nn.Module) -> str:
    """Return the style of an embedding or a head, whose inputs and outputs are whole."""
    return "embedding_rowwise" if isinstance(module, nn.Embedding) else "colwise_gather_output"


def _has_rows(module: nn.Module) -> bool:
    """Return whether a module has a weight with more rows than columns, as one with a row per id has."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and weight.shape[0] > weight.shape[1]


def _feeds_matmul(node: fx.Node, model: nn.Module) -> bool:
    """Return whether a layer or matrix product uses a value, directly or not."""
    seen, new = set[fx.Node](), [node]
    while new:
        users = {user for user in new.pop().users if user not in seen}
        for user in users:
            is_layer = user.op == "call_module" and any(True for _ in model.get_submodule(str(user.target)).parameters())
            if is_layer or function_name(user) in MATMULS:
                return True
        seen |= users
        new += users
    return False


def tied_or_vocabulary(model: nn.Module, num_shards: int, rules: Rulebook) -> set[nn.Module]:
    """Return the modules that a derived plan does not split: tied layers, and the named embedding and head.

    A layer that holds a parameter of another module cannot be split alone. ``vocabulary_steps`` splits the named vocabulary.
    """
    named = dict(model.named_modules())
    holders = Counter(held for module in named.values() for held in _parameter_ids(module))
    tied = {module for module in named.values() if any(holders[held] > 1 for held in _parameter_ids(module))}
    return tied | {named[path] for path, _ in vocabulary_steps(model, num_shards, rules)}


def _tied_modules(named: Mapping[str, nn.Module], module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that share parameters with this one, directly or through others, by path."""
    tied: dict[str, nn.Module] = {}
    held = _parameter_ids(module)
    while more := {path: other for path, other in named.items() if path not in tied and _parameter_ids(other) & held}:
        tied |= more
        held = held.union(*map(_parameter_ids, more.values()))
    return tied


def _parameter_ids(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in module._parameters.values() if tensor is not None}


def _is_divisible(module: nn.Module, num_shards: int, rules: Rulebook) -> bool:
    try:
        cut = rules.cut(module, "weight", 0)
    except LookupError:
        return False
    size = module.get_parameter("weight").shape[0]
    start, stop = shard_range(size, num_shards, num_shards - 1)
    return size % num_shards == 0 or (cut.uneven and start < stop)


def vocabulary_modules(model: Any) -> list[nn.Module]:
    """Return the embedding and the head that the model names; none, one or both."""
    found = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, name, lambda: None)()
        except NotImplementedError:  # a Transformers model without a vocabulary
            continue
        if isinstance(module, nn.Module):
            found.append(module)
    return found
