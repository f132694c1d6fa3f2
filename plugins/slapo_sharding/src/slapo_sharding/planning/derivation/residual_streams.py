"""Convolutions that add to the residual stream: a split of their output would keep the blocks whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import fx

from slapo_tracing.nodes import function_name

from ...rules.channels import channel_dim
from ..dry_run.node_values import has_gradient

_SUMS = ("add", "add_", "iadd", "sub", "sub_", "isub", "__add__", "__radd__")


def residual_streams(traced: fx.GraphModule, is_layer: Callable[..., bool], paths: Iterable[str]) -> set[str]:
    """Return the convolutions at ``paths`` whose results are added to values that they, or other layers, are computed from.

    ``is_layer`` returns whether a module is a layer, or with ``"kept"`` whether it keeps channels apart. Layers are calls here.
    """
    asked = {path for path in paths if channel_dim(traced.get_submodule(path)) != -1}
    called = {node: traced.get_submodule(str(node.target)) for node in traced.graph.find_nodes(op="call_module")}
    layers = {node for node, module in called.items() if is_layer(module) and not is_layer(module, "kept")}
    return {str(node.target) for node in layers if str(node.target) in asked and _is_added_to(node, layers)}


def _is_added_to(start: fx.Node, layers: Collection[fx.Node]) -> bool:
    unchanged, before = {start}, _sources(start)
    made = _collect_users(unchanged, layers)
    _collect_users(made, ())
    return any(
        function_name(node) in _SUMS
        and any(other in unchanged for other in node.all_input_nodes)
        and any((other in made - unchanged) or ({other} | _sources(other, layers)) & before for other in node.all_input_nodes)
        for node in unchanged | made
    )


def _sources(node: fx.Node, layers: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return the values with gradients that a node is computed from, up to results of layers."""
    found, work = set[fx.Node](), [] if node in layers else [node]
    while work:
        new = [other for other in work.pop().all_input_nodes if other not in found and has_gradient(other)]
        found.update(new)
        work += [other for other in new if other not in layers]
    return found


def _collect_users(found: set[fx.Node], layers: Collection[fx.Node]) -> set[fx.Node]:
    """Add the transitive users of ``found`` to it, up to layers, and return these layers."""
    ends, work = set[fx.Node](), list(found)
    while work:
        users = [user for user in work.pop().users if user not in found and user not in ends]
        ends.update(user for user in users if user in layers)
        work += [user for user in users if user not in layers]
        found.update(user for user in users if user not in layers)
    return ends
