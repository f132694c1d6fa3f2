"""All modules below one that kernels serve."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import fx, nn

from slapo_core import is_sharded
from slapo_tracing.nodes import is_opaque, own_forward

from ..lazy.logits import LazyHead, find_heads
from ..replacements.kernel_modules import Body, Experts, Norm, Program, body_of
from .identical_modules import kind_of
from .mlp_blocks import recognise_experts, recognise_program
from .norms import recognise_embedding, recognise_norm


class Served(NamedTuple):
    """A module that kernels serve.

    Args:
        path: Its path.
        module: The module.
        body: What it computes.
        hooked: Path of the part of it, or of itself, that something was put around; kernels may not do its work then.
    """

    path: str
    module: nn.Module
    body: Any
    hooked: str | None


def find_modules(root: nn.Module, wanted: Collection[str]) -> list[Served]:
    """The modules from ``root`` down that the wanted kernels serve, with their paths below it.

    Of modules that are alike one is looked at. Traced modules, and those that are served already, are none.
    """
    known: dict[Hashable, Body | None] = {}
    heads = find_heads(root) if "linear_cross_entropy" in wanted else {}
    found = [
        Served(path, head, LazyHead(), path if is_opaque(head) else None) for path, head in heads.items() if not body_of(head)
    ]
    graphs = {path: module for path, module in root.named_modules() if isinstance(module, fx.GraphModule)}
    for path, module in root.named_modules():
        if isinstance(module, fx.GraphModule) or body_of(module) is not None or _is_stock(module):
            continue
        if not all(_is_called(path, above, graph) for above, graph in graphs.items()):
            continue
        kind = kind_of(module)
        if kind not in known:
            known[kind] = _recognise(module, wanted)
        body = known[kind]
        if body is None or not set(body.kernels) & set(wanted):
            continue
        parts: dict[str, nn.Module] = {}
        if isinstance(body, (Experts, Program)):
            absorbed = tuple((name, module._modules[name]) for name, _ in body.absorbed)
            body = replace(body, absorbed=absorbed)
            parts |= dict(absorbed)
        if isinstance(body, (Experts, Norm, Program)):
            body = replace(body, conditions=body.conditions.of(module))
        hooked = next((name for name, part in parts.items() if is_opaque(part)), None if _may_swap(module, body) else "")
        found.append(Served(path, module, body, hooked if hooked is None else ".".join(filter(None, (path, hooked)))))
    return found


def _may_swap(module: nn.Module, body: Body) -> bool:
    """Whether what is around a module stays right: hooks and wrappers do, not a forward of its own or sharded weights."""
    own = own_forward(module)
    if isinstance(body, Experts):  # whose forward stays
        return own is None or getattr(own, "__self__", None) is module
    return own is None and not any(map(is_sharded, module._parameters.values()))


def _is_called(path: str, above: str, traced: fx.GraphModule) -> bool:
    """Whether a traced module runs the module at ``path``; of one that is not inside of it, true."""
    prefix = f"{above}." if above else ""
    if not path.startswith(prefix):
        return True
    inner = path.removeprefix(prefix)
    return any(inner == target or inner.startswith(f"{target}.") for target in _targets(traced))


def _targets(traced: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in traced.graph.find_nodes(op="call_module")]


def _is_stock(module: nn.Module) -> bool:
    """A module that is asked for nothing: a container, or a layer that does a product alone."""
    return type(module) in (nn.ModuleList, nn.ModuleDict, nn.Linear, nn.Identity, nn.Dropout)


def _recognise(module: nn.Module, wanted: Collection[str]) -> Body | None:
    body: Body | None = None
    if {"rms_norm", "layer_norm"} & set(wanted):
        body = recognise_norm(module)
    if body is None and "embedding" in wanted:
        body = recognise_embedding(module)
    if body is None and {"bias_act", "swiglu", "geglu", "bias_dropout_residual"} & set(wanted):
        body = recognise_program(module) or recognise_experts(module)
    return body
