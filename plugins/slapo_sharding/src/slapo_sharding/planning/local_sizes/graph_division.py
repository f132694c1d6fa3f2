"""Division of the sizes in a graph of a whole module, for a rank with shards of its layers."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from slapo_tracing.nodes import function_name

from ...communication.collectives import Group, all_reduce, all_reduce_grad, apply_function, num_ranks, on_first_rank
from ...syncs.sharded_norms import mean_over_group, norm_in, norm_of, variance_in
from ..dry_run.layouts import Layouts
from ..dry_run.parallel_branches import Branches
from ..dry_run.size_arguments import is_size, leaves, local_size, with_leaves


def divide_graph(layouts: Layouts, group: Group) -> None:
    """Change the graph of a dry run so that it runs on this rank's shards.

    Rewrite:
        x.view(batch, length, heads, width)         -->  x.view(batch, length, heads // ranks, width)
        x.size(2), where x is sharded along 2       -->  x.size(2) * ranks
        scores + bias, where bias is whole          -->  scores + local_part(bias, 1, group)
        scores @ values, where values are whole     -->  scores @ all_reduce_grad(values, group)
        F.linear(x, w, b), where w is row-parallel  -->  all_reduce(F.linear(x, w, on_first_rank(b, group)), group)
        torch.cat([head(x) for head in heads])      -->  torch.cat([head(x) for head in this rank's])

    Args:
        layouts: Dry run. Its graph is changed.
        group: Tensor-parallel process group.

    Raises:
        ValueError: a size to divide is not an argument of its node.
    """
    graph, ranks = layouts.graph, layouts.mesh.size()
    summed: dict[fx.Node, fx.Node] = {}
    given = {node: leaves((node.args, node.kwargs)) for node in layouts.reduced_gradients}  # before arguments change
    uses = {
        node: [place for place, each in enumerate(given[node]) if each in found]
        for node, found in layouts.reduced_gradients.items()
    }
    for branches in layouts.joint_branches.values():
        _keep_own_branches(branches, ranks, group)
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target == "size":
            _restore_whole_size(layouts, node)
        with graph.inserting_before(node):
            _cut_arguments(layouts, node, uses.get(node, ()), group, summed)
        if (sizes := layouts.sizes_to_divide.get(node)) and node not in layouts.divided_arguments:
            raise ValueError(f"sizes {sorted(sizes)} of {node.name} ({node.meta.get('source')}) are not its arguments")
        if places := layouts.divided_arguments.get(node):
            with graph.inserting_before(node):
                values = leaves((node.args, node.kwargs))
                new = {place: _divided_size(node, values[place], ranks, held) for place, held in places.items()}
            node.args, node.kwargs = with_leaves((node.args, node.kwargs), new)
        if node in layouts.norms:
            with graph.inserting_after(node):
                _reduce_statistics(layouts, node, group)
        elif op := layouts.reductions.get(node):
            with graph.inserting_after(node):
                made = _new_call(node, mean_over_group if op == "avg" else all_reduce, node, group)
            node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
    graph.lint()


def _keep_own_branches(branches: Branches, ranks: int, group: Group) -> None:
    """Remove the branches that other ranks run."""
    own, joint = 0 if group is None else group.rank(), branches.joint
    values = joint.args[0] if joint.args else joint.kwargs["tensors"]
    is_own = [branches.owner(index, ranks) == own for index in range(len(branches.nodes))]
    kept = [value for value, keeps in zip(values, is_own, strict=True) if keeps]  # type: ignore[arg-type]
    if joint.args:
        joint.args = (kept, *joint.args[1:])
    else:
        joint.kwargs = {**joint.kwargs, "tensors": kept}
    others = {node for nodes, keeps in zip(branches.nodes, is_own, strict=True) if not keeps for node in nodes}
    for node in reversed(joint.graph.nodes):
        if node in others:
            joint.graph.erase_node(node)
    unused = [name for name, split in branches.splits(ranks).items() if split.owner != own]
    with joint.graph.inserting_after(joint):
        held = _new_call(joint, with_empty_parameter_gradients, joint)
    with joint.graph.inserting_before(held):
        held.args = (joint, *map(joint.graph.get_attr, sorted(unused)))
    joint.replace_all_uses_with(held, delete_user_cb=lambda user: user is not held)


def local_part(x: torch.Tensor, dim: int, group: Group, blocks: tuple[int, ...] = ()) -> torch.Tensor:
    """Return this rank's shard of a whole tensor, or of each of its blocks; the gradient is zero outside of it."""
    if blocks:
        return torch.cat([local_part(block, dim, group) for block in torch.split(x, [*blocks], dim)], dim)
    size = x.size(dim) // num_ranks(group)
    return x.narrow(dim, size * (0 if group is None else group.rank()), size)


def with_empty_parameter_gradients(x: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
    """Return ``x``, with zero gradients for parameters that this rank does not use, as engines wait for every gradient."""
    return apply_function(_EmptyParameterGradients, x, *unused) if torch.is_grad_enabled() else x


class _EmptyParameterGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*unused)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad, *map(torch.zeros_like, ctx.saved_tensors)


def _reduce_statistics(layouts: Layouts, node: fx.Node, group: Group) -> None:
    """Replace a norm or variance by one with reduced statistics."""
    graph = node.graph
    if node.op != "call_module":
        made = _new_call(node, norm_in(node) or variance_in(node), group, *node.args)
        made.kwargs = node.kwargs
    else:
        module, x = layouts.fetch_attr(str(node.target)), node.all_input_nodes[0]
        function = norm_of(module)
        with graph.inserting_before(node):
            held = dict[str, fx.Node]()
            for name in (name for name in ("weight", "bias") if module._parameters.get(name) is not None):
                summed = _new_call(node, all_reduce_grad, graph.get_attr(f"{node.target}.{name}"), group)
                held[name] = _new_call(node, local_part, summed, 0, group)
        made = _new_call(node, function, group, x, module.normalized_shape)
        made.kwargs = {**held, "eps": module.eps}
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    graph.erase_node(node)


def _cut_arguments(layouts: Layouts, node: fx.Node, uses: Iterable[int], group: Group, summed: dict[fx.Node, fx.Node]) -> None:
    """Cut whole arguments of a node, and reduce the gradients of those, at ``uses``, that each rank uses on its shard.

    ``summed`` is filled with the node that reduces each value's gradient, so that all uses share one reduction.
    """
    values = leaves((node.args, node.kwargs))
    new: dict[int, Any] = {}
    for place in uses:
        value = values[place]
        if value not in summed:
            summed[value] = _with_reduced_gradient(node, value, group)
        new[place] = summed[value]
    blocks = layouts.cut_blocks.get(node) or layouts.blocks_of(node)
    for place, dim in layouts.cut_arguments.get(node, {}).items():
        new[place] = _new_call(node, local_part, new.get(place, values[place]), dim, group, blocks)
    if (at := layouts.first_rank_values.get(node)) is not None:
        new[at] = _new_call(node, on_first_rank, values[at], group)
    if new:
        node.args, node.kwargs = with_leaves((node.args, node.kwargs), new)


_REPEATS = frozenset("expand expand_as repeat repeat_interleave unsqueeze transpose permute view reshape".split())


def _with_reduced_gradient(node: fx.Node, value: fx.Node, group: Group) -> fx.Node:
    """Return a node that reduces the gradient of a value, placed before its repetition per head if nothing else uses it."""
    source = value
    while function_name(source) in _REPEATS and len(given := source.all_input_nodes) == 1:
        (before,) = given
        others = [user for user in before.users if user is not source and isinstance(user.meta.get("val"), torch.Tensor)]
        if others or before.op == "placeholder":
            break
        source = before
    if source is value or len(value.users) > 1:
        return _new_call(node, all_reduce_grad, value, group)
    with node.graph.inserting_after(source):
        made = _new_call(source, all_reduce_grad, source, group)
    source.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return value


def _restore_whole_size(layouts: Layouts, node: fx.Node) -> None:
    """Multiply a size read from a shard so that it is the size of the whole tensor."""
    source, dim = node.args
    assert isinstance(source, fx.Node)
    value, local = source.meta.get("val"), layouts.local_shapes.get(source)
    if not isinstance(value, torch.Tensor) or local is None or value.shape[dim] == local[dim]:  # type: ignore[index]
        return
    with layouts.graph.inserting_after(node):
        whole = _scaled_size(node, operator.mul, node, layouts.mesh.size())
    node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)


def _divided_size(node: fx.Node, size: Any, ranks: int, held: int) -> Any:
    """Return the local value of a size, as a node if the size is one."""
    if held or (is_size(size) and size < 0):
        return _new_call(node, local_size, size, ranks, held) if isinstance(size, fx.Node) else local_size(size, ranks, held)
    return _scaled_size(node, operator.floordiv, size, ranks)


def _scaled_size(node: fx.Node, function: Any, value: Any, ranks: int) -> Any:
    """Apply a function to a size and the number of ranks, as a node if the size is one."""
    return _new_call(node, function, value, ranks) if isinstance(value, fx.Node) else function(value, ranks)


def _new_call(node: fx.Node, function: Any, *args: Any) -> fx.Node:
    made = node.graph.call_function(function, args)
    made.meta.update({key: node.meta[key] for key in ("source", "module", "regions", "is_rewrite") if key in node.meta})
    return made


_LIKE_SHAPE = {"view_as": "view", "reshape_as": "reshape"}
_LIKE_TYPE = frozenset(("type_as", "to"))


def without_prototypes(graph: fx.Graph) -> None:
    """Replace tensor arguments that are prototypes by their shape or dtype: neither their data nor their gradient is used.

    Rewrite:
        x.view_as(y)             -->  x.view(*sizes of y)
        x.type_as(y) or x.to(y)  -->  x.to(dtype of y)
    """
    for node in graph.find_nodes(op="call_method"):
        name = function_name(node)
        values: list[Any] = [given.meta.get("val") if isinstance(given, fx.Node) else None for given in node.args]
        if node.kwargs or len(values) != 2 or not all(isinstance(value, torch.Tensor) for value in values):
            continue
        if name in _LIKE_SHAPE:
            node.target, node.args = _LIKE_SHAPE[name], (node.args[0], *values[1].shape)
        elif name in _LIKE_TYPE:
            given, prototype = values
            device = () if given.device == prototype.device else (prototype.device,)
            node.target, node.args = "to", (node.args[0], *device, prototype.dtype)
