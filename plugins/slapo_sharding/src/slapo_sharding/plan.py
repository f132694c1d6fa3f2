"""Tensor-parallel plans: which module is split how, as ``{path or glob: style}``.

The styles are those Transformers publishes in ``base_model_tp_plan``:

    colwise                        output sharded; its input is replicated
    rowwise                        input sharded; output replicated
    colwise_gather_output          output gathered: both sides replicated
    rowwise_split_input            input cut first: both sides replicated
    embedding_rowwise              vocabulary split over the ranks
    packed_colwise, packed_rowwise as colwise and rowwise, the split dimension made of two equal parts, as gate and up
    moe_tp_experts                 stacked experts, each split along its inner width; the output is reduced. What is said of
                                   their single parameters follows from it
    replicated_with_grad_allreduce parameters are whole, but used on sharded values, so their gradients are summed:
                                   ``sync("grad", "all_reduce")``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from . import attention
from .dealing import share
from .layers import is_conv1d
from .rulebook import Rulebook

Plan = Mapping[str, str]

BESIDE_SHARDED = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
"""Styles of modules around which values are sharded: what lies beside them may see such."""


def tensor_parallel_plan(model: nn.Module) -> dict[str, str]:
    """The plan of a model: what Transformers publishes for it, or what its structure says; empty when neither says anything.

    Vocabulary embedding and head are not part of it; see ``vocabulary``.
    """
    return published_plan(model) or gpt2_plan(model)


def published_plan(model: Any) -> dict[str, str]:
    """The plan that comes with a Transformers model, keys counted from the model's top."""
    plan = getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    outside = {path for path, module in model.named_modules() if module in _vocabulary_modules(model)}
    return {key: style for key, style in plan.items() if key not in outside}


def gpt2_plan(model: nn.Module) -> dict[str, str]:
    """A plan for models built like GPT-2, told by their Conv1D layers ``c_attn``/``c_proj`` and ``c_fc``/``c_proj``."""
    plan: dict[str, str] = {}
    for path, module in model.named_modules():
        children = {name for name, child in module.named_children() if is_conv1d(child)}
        into = children & {"c_attn", "q_attn", "c_fc"}
        if into and "c_proj" in children:
            prefix = f"{path}." if path else ""
            plan.update({f"{prefix}{name}": "colwise" for name in sorted(into)})
            plan[f"{prefix}c_proj"] = "rowwise"
    return plan


def undeclared_parameters(model: nn.Module, steps: Plan) -> list[str]:
    """Names of parameters that lie beside split layers, in the same module, without a style of their own.

    Their gradients are partial if they are used on sharded values (a scale per head, an activation's slope), which only the
    module's code knows.
    """
    owners = {path.rpartition(".")[0] for path, style in steps.items() if style in BESIDE_SHARDED}
    found = []
    for owner in sorted(owners):
        for name, _ in model.get_submodule(owner).named_parameters(owner):
            if steps.keys().isdisjoint(_ancestors(name)):
                found.append(name)
    return found


def left_whole(model: nn.Module, steps: Plan, rules: Rulebook) -> str | None:
    """The first layer on which a plan that splits experts is silent: many leave their attention whole, or a shared expert."""
    heads = _vocabulary_modules(model)
    layers = (path for path, module in model.named_modules() if rules.is_layer(module) and module not in heads)
    return next((path for path in layers if path not in steps), None) if "moe_tp_experts" in steps.values() else None


def head_norms(model: nn.Module, steps: Plan) -> Iterator[str]:
    """Paths of the norms of single heads on which a plan that splits the heads is silent: each rank has the part of its own."""
    for name in undeclared_parameters(model, steps):
        path = name.rpartition(".")[0]
        owner, _, child = path.rpartition(".")
        heads = any(f"{owner}.{other}" in steps for other in attention.PROJECTIONS)
        if heads and attention.norms_heads(model.get_submodule(owner), child):
            yield path


def _ancestors(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def vocabulary(model: nn.Module, num_shards: int, rules: Rulebook) -> list[tuple[str, str]]:
    """Paths and styles of the embedding and the head, where the vocabulary can be split: no rule is against it.

    What is tied to them is split along, or all of it stays whole. Without a head the embedding stays whole: its weight may
    serve as one.
    """
    named = dict(model.named_modules())
    found = [module for module in _vocabulary_modules(model) if any(module is other for other in named.values())]
    if len(found) < 2:
        return []
    steps: dict[str, str] = {}
    for module in found:
        tied = _tied(named, module)
        if all(_splits(other, num_shards, rules) for other in tied.values()):
            styles = {True: "embedding_rowwise", False: "colwise_gather_output"}
            steps.update((path, styles[isinstance(other, nn.Embedding)]) for path, other in tied.items())
    return list(steps.items())


def tied_or_vocabulary(model: nn.Module, num_shards: int, rules: Rulebook) -> set[nn.Module]:
    """Return the modules that a derived plan leaves alone.

    A layer that holds a parameter of another module cannot be split alone, and the vocabulary is split by ``vocabulary``.
    """
    named = dict(model.named_modules())
    holders = Counter(held for module in named.values() for held in _held(module))
    tied = {module for module in named.values() if any(holders[held] > 1 for held in _held(module))}
    return tied | {named[path] for path, _ in vocabulary(model, num_shards, rules)}


def _tied(named: Mapping[str, nn.Module], module: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold a parameter of this one, or one of theirs, by path."""
    tied: dict[str, nn.Module] = {}
    held = _held(module)
    while more := {path: other for path, other in named.items() if path not in tied and _held(other) & held}:
        tied |= more
        held = held.union(*map(_held, more.values()))
    return tied


def _held(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in module._parameters.values() if tensor is not None}


def _splits(module: nn.Module, num_shards: int, rules: Rulebook) -> bool:
    try:
        cut = rules.cut(module, "weight", 0)
    except LookupError:
        return False
    size = module.get_parameter("weight").shape[0]
    start, stop = share(size, num_shards, num_shards - 1)
    return size % num_shards == 0 or (cut.uneven and start < stop)


def _vocabulary_modules(model: Any) -> list[nn.Module]:
    """The embedding and the head, as far as the model names them."""
    found = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, name, lambda: None)()
        except NotImplementedError:  # a Transformers model without words
            continue
        if isinstance(module, nn.Module):
            found.append(module)
    return found
