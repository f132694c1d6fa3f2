"""Parameters that forwards use directly: the splits to try for each, and whole ones that meet sharded and whole values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import torch
from torch import fx, nn

from slapo_tracing.nodes import expect, function_name

from ..dry_run.layout_adaptation import cut_dim
from ..dry_run.layout_records import LayoutRecords
from ..dry_run.layouts import Layouts
from ..dry_run.node_values import has_any_gradient, has_gradient, parameters_of
from ..dry_run.split_specs import ParameterSplit, fused_sizes

_MATMULS = frozenset("matmul mm bmm linear einsum addmm baddbmm tensordot".split())
_MAX_REARRANGEMENTS = 4
"""Limit on operations that rearrange a parameter before a product uses it."""


def direct_parameters(traced: fx.GraphModule, without: Collection[str]) -> dict[str, list[ParameterSplit]]:
    """Return the splits to try for each parameter that a matrix product of some forward uses.

    A dimension that the product sums over does not fit if the other factor is whole. The next dimension is tried then.
    ``without`` has names of parameters that are not split, and paths of modules whose parameters rules split or leave whole.
    """
    found: dict[str, list[ParameterSplit]] = {}
    for node, name, tensor in _untied_uses(traced):
        stays_whole = name in without or name.rpartition(".")[0] in without
        if name not in found and not stays_whole and tensor.dim() > 1 and _reaches_matmul(node):
            found[name] = [ParameterSplit(dim) for dim, size in enumerate(tensor.shape) if size > 1]
    return {name: splits for name, splits in found.items() if splits}


def _untied_uses(traced: fx.GraphModule) -> Iterator[tuple[fx.Node, str, nn.Parameter]]:
    """Yield the uses of floating-point parameters that one module holds under one name."""
    number = Counter(id(each) for module in traced.modules() for each in module._parameters.values())
    for node in traced.graph.find_nodes(op="get_attr"):
        path, _, own = str(node.target).rpartition(".")
        tensor = traced.get_submodule(path)._parameters.get(own)
        if tensor is not None and number[id(tensor)] == 1 and tensor.is_floating_point() and "val" in node.meta:
            yield node, str(node.target), tensor


def _reaches_matmul(node: fx.Node) -> bool:
    """Return whether a matrix product uses a parameter, directly or rearranged."""
    for _ in range(_MAX_REARRANGEMENTS):
        users = [user for user in node.users if user.target is not expect]
        if any(function_name(user) in _MATMULS for user in users):
            return True
        alone = [user for user in users if user.op.startswith("call") and user.all_input_nodes == [node]]
        if not alone or not isinstance(alone[0].meta.get("val"), torch.Tensor):
            return False
        node = alone[0]
    return False


def fused_splits(layouts: LayoutRecords, name: str) -> dict[str, ParameterSplit]:
    """Return the splits of a fused projection and its biases by the parts that the model takes out; empty for no parts.

    In the dry run, the parameter is split as one part.
    """
    split = layouts.parameters[name]
    own = frozenset((name,))
    uses = [node for node in layouts.local_shapes if node not in layouts.weights and layouts.sources.get(node) == own]
    products = [node for node in uses if any(other in layouts.weights for other in node.all_input_nodes)]
    biases: set[str] = set()
    ends: list[fx.Node] = []
    for node in products:
        biases |= _biases(node)
        users = [user for user in node.users if user.target is not expect]
        added = _biases(users[0]) if len(users) == 1 and function_name(users[0]) in ("add", "iadd", "add_") else set()
        ends.append(users[0] if added else node)
        biases |= added
    whole = [tuple(node.meta["val"].shape) for node in products]
    dims = {
        dim - len(shape)
        for node, shape in zip(products, whole, strict=True)
        for dim, size in enumerate(shape)
        if layouts.local_shapes[node][dim] != size
    }
    if len(dims) != 1 or split.blocks:
        return {}
    (dim,) = dims
    blocks = fused_sizes(ends, dim)
    if len(blocks) < 2 or (biases and dim != -1):
        return {}
    return {name: ParameterSplit(split.dim, blocks), **{bias: ParameterSplit(0, blocks) for bias in biases}}


def _biases(node: fx.Node) -> set[str]:
    """Return the names of the one-dimensional parameters among the arguments of a node."""
    given = [(str(other.target), other.meta.get("val")) for other in node.all_input_nodes if other.op == "get_attr"]
    return {name for name, value in given if isinstance(value, torch.Tensor) and value.dim() == 1}


def cut_parameters(layouts: Layouts, traced: fx.GraphModule) -> dict[str, ParameterSplit]:
    """Return whole parameters that every use cuts, in modules with other split parameters."""
    found: dict[str, set[int | None]] = {}
    for node, name, _ in _untied_uses(traced):
        if name not in layouts.parameters and name.rpartition(".")[0] in layouts.parameter_owners:
            dims = {cut_dim(layouts, user, node) for user in node.users if user.target is not expect}
            found[name] = found.get(name, set()) | dims
    only = {name: next(iter(dims)) for name, dims in found.items() if len(dims) == 1}
    return {name: ParameterSplit(dim) for name, dim in only.items() if dim is not None}


def mixed_parameters(layouts: Layouts) -> set[str]:
    """Return the names, with tied ones, of parameters whose gradient is partial in one use and whole in another.

    One reduction cannot make such a gradient right.
    """
    held = layouts.traced.named_parameters(remove_duplicate=False)
    named = {name: id(each) for name, each in held if name not in layouts.parameters}
    partial = {named[name] for name in layouts.partial_parameters if name in named}
    whole = {named[name] for name in _parameters_used_whole(layouts) if name in named} if partial else set()
    return {name for name, key in named.items() if key in partial & whole}


def _parameters_used_whole(layouts: Layouts) -> Iterator[str]:
    """Yield the names of parameters in uses whose gradient is whole on every rank."""
    partial = {(node, other) for node, other, _ in layouts.partial_uses}
    for node in layouts.graph.nodes:
        if node.op == "call_module" and str(node.target) not in layouts.splits and (node, None) not in partial:
            module = layouts.traced.get_submodule(str(node.target))
            yield from (f"{node.target}.{name}" for name, each in module.named_parameters() if each.requires_grad)
        if node.op == "output" or (has_any_gradient(node) and not parameters_of(node)):
            for other in node.all_input_nodes:
                if has_gradient(other) and (node, other) not in partial and other not in layouts.weights:
                    yield from parameters_of(other)
