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

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..rules.layers import is_conv1d
from ..rules.rulebook import Rulebook
from ..splitting import attention_heads
from ..splitting.module_paths import ancestors
from .derivation.vocabulary import vocabulary_modules

Plan = Mapping[str, str]

BESIDE_SHARDED = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
"""Styles of modules around which values are sharded: what lies beside them may see such."""


def tensor_parallel_plan(model: nn.Module) -> dict[str, str]:
    """The plan of a model: what Transformers publishes for it, or what its structure says; empty when neither says anything.

    Vocabulary embedding and head are not part of it; see ``vocabulary.py``.
    """
    return published_plan(model) or gpt2_plan(model)


def published_plan(model: Any) -> dict[str, str]:
    """The plan that comes with a Transformers model, keys counted from the model's top."""
    plan = getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    outside = {path for path, module in model.named_modules() if module in vocabulary_modules(model)}
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
            if steps.keys().isdisjoint(ancestors(name)):
                found.append(name)
    return found


def first_unplanned_layer(model: nn.Module, steps: Plan, rules: Rulebook) -> str | None:
    """The first layer on which a plan that splits experts is silent: many leave their attention whole, or a shared expert."""
    heads = vocabulary_modules(model)
    layers = (path for path, module in model.named_modules() if rules.is_layer(module) and module not in heads)
    return next((path for path in layers if path not in steps), None) if "moe_tp_experts" in steps.values() else None


def head_norms(model: nn.Module, steps: Plan) -> Iterator[str]:
    """Paths of the norms of single heads on which a plan that splits the heads is silent: each rank has the part of its own."""
    for name in undeclared_parameters(model, steps):
        path = name.rpartition(".")[0]
        owner, _, child = path.rpartition(".")
        heads = any(f"{owner}.{other}" in steps for other in attention_heads.PROJECTIONS)
        if heads and attention_heads.norms_heads(model.get_submodule(owner), child):
            yield path
