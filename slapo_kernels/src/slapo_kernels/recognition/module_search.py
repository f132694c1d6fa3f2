"""Search for the modules that kernels can serve."""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from slapo_core import is_sharded, paths
from slapo_tracing.nodes import is_opaque, own_forward

from ..lazy.logits import LazyHead
from ..replacements.kernel_modules import FusedForward, KernelForward, NormForward, kernel_forward_of
from .mlp_blocks import recognise_block, recognise_experts
from .norms import recognise_embedding, recognise_norm


class ServedModule(NamedTuple):
    """A module that kernels can serve.

    Args:
        kernel_forward: The forward that calls kernels.
        opaque_path: Path of the module, or of a child, whose hooks or wrappers forbid the replacement; None if there are none.
    """

    path: str
    module: nn.Module
    kernel_forward: Any
    opaque_path: str | None


def find_modules(root: nn.Module, wanted: Collection[str]) -> list[ServedModule]:
    """Return the modules from ``root`` down that the wanted kernels can serve, with paths below it.

    Identical modules are analysed once. Traced modules and kernel modules are skipped.
    """
    known: dict[Hashable, KernelForward | None] = {}
    heads = _find_heads(root) if "linear_cross_entropy" in wanted else {}
    found = [
        ServedModule(path, head, LazyHead(), path if is_opaque(head) else None)
        for path, head in heads.items()
        if not kernel_forward_of(head)
    ]
    graphs = {path: module for path, module in root.named_modules() if isinstance(module, fx.GraphModule)}
    for path, module in root.named_modules():
        if isinstance(module, fx.GraphModule) or kernel_forward_of(module) is not None or _is_stock(module):
            continue
        if not all(_is_called(path, above, graph) for above, graph in graphs.items()):
            continue
        kind = structural_key(module)
        if kind not in known:
            known[kind] = _recognise(module, wanted)
        kernel_forward = known[kind]
        if kernel_forward is None or not set(kernel_forward.kernels) & set(wanted):
            continue
        absorbed: tuple[Any, ...] = ()
        if isinstance(kernel_forward, FusedForward):
            absorbed = tuple((name, module._modules[name]) for name, _ in kernel_forward.absorbed)
            kernel_forward = replace(kernel_forward, absorbed=absorbed)
        if isinstance(kernel_forward, (NormForward, FusedForward)):
            kernel_forward = replace(kernel_forward, guard=kernel_forward.guard.for_module(module))
        opaque = [paths.join(path, name) for name, part in absorbed if is_opaque(part)]
        if not _may_be_replaced(module, kernel_forward):
            opaque.append(path)
        found.append(ServedModule(path, module, kernel_forward, opaque[0] if opaque else None))
    return found


def _find_heads(root: nn.Module) -> dict[str, nn.Module]:
    """Return the heads of Transformers' models from ``root`` down, as they declare them, and ``root`` if it is a Linear."""
    heads = [root] if isinstance(root, nn.Linear) else []
    for module in root.modules():
        ask = getattr(module, "get_output_embeddings", None)
        heads += [ask()] if callable(ask) else []
    ids = {id(head) for head in heads if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward}
    return {path: module for path, module in root.named_modules() if id(module) in ids}


def _may_be_replaced(module: nn.Module, kernel_forward: KernelForward) -> bool:
    """Return whether the class's forward is the one that runs and no weight is sharded; hooks and wrappers are no obstacle."""
    own = own_forward(module)
    if kernel_forward.method != "forward":  # its forward stays
        return own is None or getattr(own, "__self__", None) is module
    return own is None and not any(map(is_sharded, module._parameters.values()))


def _is_called(path: str, above: str, traced: fx.GraphModule) -> bool:
    """Return whether a traced module calls the module at ``path``, or the module is not inside it."""
    prefix = f"{above}." if above else ""
    if not path.startswith(prefix):
        return True
    inner = path.removeprefix(prefix)
    targets = [str(node.target) for node in traced.graph.find_nodes(op="call_module")]
    return any(inner == target or inner.startswith(f"{target}.") for target in targets)


def _is_stock(module: nn.Module) -> bool:
    """Return whether the module is a container or a plain layer, which no kernel serves."""
    return type(module) in (nn.ModuleList, nn.ModuleDict, nn.Linear, nn.Identity, nn.Dropout)


def _recognise(module: nn.Module, wanted: Collection[str]) -> KernelForward | None:
    kernel_forward: KernelForward | None = None
    if {"rms_norm", "layer_norm"} & set(wanted):
        kernel_forward = recognise_norm(module)
    if kernel_forward is None and "embedding" in wanted:
        kernel_forward = recognise_embedding(module)
    if kernel_forward is None and {"bias_act", "swiglu", "geglu", "bias_dropout_residual"} & set(wanted):
        kernel_forward = recognise_block(module) or recognise_experts(module)
    return kernel_forward


_OF_TORCH = frozenset((*vars(nn.Module()), "forward"))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)


def structural_key(module: nn.Module) -> Hashable:
    """Return a key that is equal for modules of one class with equal attributes, shapes and children.

    An attribute that cannot be compared by value is compared by identity.
    """
    settings = tuple(
        (name, _value(value, module))
        for name, value in vars(module).items()
        if name not in _OF_TORCH and not name.startswith("_slapo")
    )
    tensors = [*module._parameters.items(), *module._buffers.items()]
    shapes = tuple((name, None if tensor is None else (tensor.shape, tensor.dtype)) for name, tensor in tensors)
    parts = tuple((name, child and structural_key(child)) for name, child in module._modules.items())
    return type(module), settings, shapes, parts


def _value(value: Any, owner: nn.Module) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), repr(value) if isinstance(value, float) else value
    if type(value) in (list, tuple):
        return type(value), tuple(_value(item, owner) for item in value)
    if isinstance(value, functools.partial):
        given = tuple((name, _value(item, owner)) for name, item in value.keywords.items())
        return "partial", _value(value.func, owner), _value(value.args, owner), given
    if isinstance(value, types.MethodType) and value.__self__ is owner:
        return "method", value.__func__
    return "object", id(value)
