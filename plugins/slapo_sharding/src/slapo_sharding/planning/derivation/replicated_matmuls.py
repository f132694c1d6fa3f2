"""Expensive matrix products of whole values, which every rank computes beside split layers."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import chain

import torch
from torch import fx, nn

from slapo_core import is_sharded, shard_spec
from slapo_tracing.nodes import function_name

from ...splitting.module_paths import ancestors, without_block_numbers
from ..dry_run.layouts import Layouts
from ..dry_run.node_values import parameters_of

MATMULS = frozenset("linear bilinear matmul mm bmm addmm baddbmm einsum tensordot conv1d conv2d conv3d".split())
"""Names of functions that multiply matrices."""
_MIN_SHARE = 1 / 8
"""Least share of the work of the heaviest product, so that routers and adapters of low rank do not count."""


def replicated_matmuls(model: nn.Module, layouts: Layouts, split: Collection[str]) -> dict[str, str]:
    """Return the modules with expensive products of whole values, and the source line of the first product.

    Identical modules are named once. A repeated module with several such products and none of the ``split`` paths in it stands
    for all of them.
    """
    work = {node: _num_multiplications(node, model) for node in layouts.graph.nodes}
    places = {node: path for node, amount in work.items() if amount and (path := _matmul_owner(node, model)) is not None}
    least = _MIN_SHARE * max(work.values(), default=0.0)
    found: dict[str, list[fx.Node]] = {}
    for node, path in places.items():
        if not any(value in layouts.sources or value in layouts.local_shapes for value in (node, *node.all_input_nodes)):
            found.setdefault(_outermost(path, split), []).append(node)
    named = dict[str, str]()
    for owner, nodes in found.items():
        if sum(work[node] for node in nodes) >= least:
            named[owner if len(nodes) > 1 else places[nodes[0]]] = str(nodes[0].meta.get("source"))
    return {path: named[path] for path in {without_block_numbers(path): path for path in reversed(named)}.values()}


def _num_multiplications(node: fx.Node, model: nn.Module) -> float:
    """Return the approximate number of multiplications of a matrix product; 0 for any other node."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dim():
        return 0.0
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        own = chain(module.parameters(), module.buffers())
        is_conv = isinstance(module, nn.modules.conv._ConvNd)
        weights = sum(math.prod(_whole_shape(each)[0 if is_conv else -2 :]) for each in own if each.dim() > 1)
        return 0.0 if isinstance(module, nn.Embedding) else weights * value.numel() / value.shape[-1]
    given = [other for other in node.all_input_nodes if isinstance(other.meta.get("val"), torch.Tensor)]
    has_matrix = any(other.op == "get_attr" and other.meta["val"].dim() > 1 for other in given)
    is_product = function_name(node) in MATMULS or (function_name(node) == "apply" and has_matrix)
    if not is_product or len(given) < 2:
        return 0.0
    sizes = sorted(other.meta["val"].numel() for other in given)
    return math.sqrt(value.numel() * sizes[-1] * sizes[-2])  # m k n, of matrices m x k and k x n


def _whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    spec = shard_spec(tensor)
    return tuple(tensor.shape) if spec is None else spec.full_shape


def _matmul_owner(node: fx.Node, model: nn.Module) -> str | None:
    """Return the path of the module that multiplies, or the name of its parameter if the module is split in part."""
    path = str(node.target if node.op == "call_module" else node.meta.get("module", ""))
    if not any(map(is_sharded, model.get_submodule(path).parameters())):
        return path
    names = chain.from_iterable(map(parameters_of, node.all_input_nodes))
    return next(names, None) if node.op != "call_module" else None


def _outermost(path: str, split: Collection[str]) -> str:
    """Return the outermost repeated module around a path in which nothing is split, or the path; never a list element."""
    outer = (each for each in ancestors(path) if without_block_numbers(each) != each and not each.rpartition(".")[2].isdigit())
    return ([path] + [each for each in outer if each not in split])[-1]
