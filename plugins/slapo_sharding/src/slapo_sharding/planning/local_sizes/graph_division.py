"""Division of the sizes in a graph of a whole module, for a rank that has parts of its layers."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from slapo_tracing.nodes import function_name

from ...communication.collectives import Group, all_reduce, all_reduce_grad, apply_function, num_ranks
from ...syncs.sharded_norms import mean_over_group, norm_in, norm_of, variance_in
from ..dry_run.layouts import Layouts
from ..dry_run.parallel_branches import Branches
from ..dry_run.size_arguments import is_size, leaves, local_size, with_leaves


def make_local(layouts: Layouts, group: Group) -> None:
    """Let the graph of a dry run give a rank's part of what it gives for the whole module.

    Rewrite:
        x.view(batch, length, heads, width)         -->  x.view(batch, length, heads // ranks, width)
        x.size(2), where a rank has a part of it    -->  x.size(2) * ranks
        scores + bias, where that is whole          -->  scores + part(bias, 1, group)
        scores @ values, where these are whole      -->  scores @ all_reduce_grad(values, group)
        F.linear(x, w, b), where w is split by rows -->  all_reduce(F.linear(x, w, once(b, group)), group)
        torch.cat([head(x) for head in heads])      -->  torch.cat([head(x) for head in this rank's])

    Args:
        layouts: The dry run; its graph is changed.
        group: The tensor-parallel ranks.
    """
    graph, ranks = layouts.graph, layouts.mesh.size()
    summed: dict[fx.Node, fx.Node] = {}
    uses = {node: _places(node, found) for node, found in layouts.summed_gradients.items()}
    for branches in layouts.dealt.values():
        _keep_own(branches, ranks, group)
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target == "size":
            _read_whole(layouts, node)
        with graph.inserting_before(node):
            _take_parts(layouts, node, uses.get(node, ()), group, summed)
        if layouts.sized.get(node) and node not in layouts.divided:
            raise ValueError(
                f"sizes {sorted(layouts.sized[node])} of {node.name} ({node.meta.get('source')}) are not its arguments"
            )
        if places := layouts.divided.get(node):
            with graph.inserting_before(node):
                values = leaves((node.args, node.kwargs))
                new = {place: _divided(node, values[place], ranks, held) for place, held in places.items()}
            node.args, node.kwargs = with_leaves((node.args, node.kwargs), new)
        if node in layouts.norms:
            with graph.inserting_after(node):
                _sum_statistics(layouts, node, group)
        elif op := layouts.reduced.get(node):
            with graph.inserting_after(node):
                _add_up(node, op == "avg", group)
    graph.lint()


def _keep_own(branches: Branches, ranks: int, group: Group) -> None:
    """Leave out the branches that other ranks run."""
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
        held = _made(joint, beside, joint)
    with joint.graph.inserting_before(held):
        held.args = (joint, *map(joint.graph.get_attr, sorted(unused)))
    joint.replace_all_uses_with(held, delete_user_cb=lambda user: user is not held)


def part(x: torch.Tensor, dim: int, group: Group, blocks: tuple[int, ...] = ()) -> torch.Tensor:
    """Return this rank's part of a whole tensor, or of each of its blocks; its gradient is zero elsewhere."""
    if blocks:
        return torch.cat([part(block, dim, group) for block in torch.split(x, [*blocks], dim)], dim)
    size = x.size(dim) // num_ranks(group)
    return x.narrow(dim, size * (0 if group is None else group.rank()), size)


def beside(x: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
    """Return a value; parameters without elements on this rank get gradients as all others do, for which engines wait."""
    return apply_function(_Beside, x, *unused) if torch.is_grad_enabled() else x


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*unused)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad, *map(torch.zeros_like, ctx.saved_tensors)


def once(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return a whole tensor on the first rank, and zeros elsewhere, for a sum over the ranks; its gradient is whole on all."""
    return x if group is None or group.rank() == 0 else x - x.detach()


def _add_up(node: fx.Node, is_mean: bool, group: Group) -> None:
    made = _made(node, mean_over_group if is_mean else all_reduce, node, group)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _sum_statistics(layouts: Layouts, node: fx.Node, group: Group) -> None:
    """Put a norm whose statistics are summed in the place of one."""
    graph = node.graph
    if node.op != "call_module":
        made = _made(node, norm_in(node) or variance_in(node), group, *node.args)
        made.kwargs = node.kwargs
    else:
        module, x = layouts.fetch_attr(str(node.target)), node.all_input_nodes[0]
        function = norm_of(module)
        with graph.inserting_before(node):
            held = {
                name: _made(node, part, _made(node, all_reduce_grad, graph.get_attr(f"{node.target}.{name}"), group), 0, group)
                for name in ("weight", "bias")
                if module._parameters.get(name) is not None
            }
        made = _made(node, function, group, x, module.normalized_shape)
        made.kwargs = {**held, "eps": module.eps}
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    graph.erase_node(node)


def _places(node: fx.Node, found: Collection[fx.Node]) -> list[int]:
    """Return the places of some values among the leaves of a node's arguments, before others take these places."""
    return [place for place, value in enumerate(leaves((node.args, node.kwargs))) if value in found]


def _take_parts(layouts: Layouts, node: fx.Node, uses: Iterable[int], group: Group, summed: dict[fx.Node, fx.Node]) -> None:
    """Give a node parts of whole values, and sum the gradients of those that ranks use each on a part.

    Args:
        layouts: The dry run.
        node: The node.
        uses: Places of the values whose gradients are to be summed.
        group: The tensor-parallel ranks.
        summed: Whole values to those of which gradients are summed; filled, so that each sum is one for all uses.
    """
    values = leaves((node.args, node.kwargs))
    new: dict[int, Any] = {}
    for place in uses:
        value = values[place]
        if value not in summed:
            summed[value] = _summed(node, value, group)
        new[place] = summed[value]
    blocks = layouts.cut_blocks.get(node) or layouts.blocks_of(node)
    for place, dim in layouts.cut.get(node, {}).items():
        new[place] = _made(node, part, new.get(place, values[place]), dim, group, blocks)
    if (at := layouts.once.get(node)) is not None:
        new[at] = _made(node, once, values[at], group)
    if new:
        node.args, node.kwargs = with_leaves((node.args, node.kwargs), new)


_REPEATS = frozenset("expand expand_as repeat repeat_interleave unsqueeze transpose permute view reshape".split())


def _summed(node: fx.Node, value: fx.Node, group: Group) -> fx.Node:
    """Return a node for a value whose gradient is summed: before it is repeated for all heads, where nothing else uses it."""
    source = value
    while function_name(source) in _REPEATS and len(given := source.all_input_nodes) == 1:
        (before,) = given
        others = [user for user in before.users if user is not source and isinstance(user.meta.get("val"), torch.Tensor)]
        if others or before.op == "placeholder":
            break
        source = before
    if source is value or len(value.users) > 1:
        return _made(node, all_reduce_grad, value, group)
    with node.graph.inserting_after(source):
        made = _made(source, all_reduce_grad, source, group)
    source.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return value


def _read_whole(layouts: Layouts, node: fx.Node) -> None:
    """Let a size that is read from a shard be that of the whole tensor."""
    source, dim = node.args
    assert isinstance(source, fx.Node)
    value, local = source.meta.get("val"), layouts.local.get(source)
    if not isinstance(value, torch.Tensor) or local is None or value.shape[dim] == local[dim]:  # type: ignore[index]
        return
    with layouts.graph.inserting_after(node):
        whole = _beside(node, operator.mul, node, layouts.mesh.size())
    node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)


def _divided(node: fx.Node, size: Any, ranks: int, held: int) -> Any:
    """Return a node for a size on one rank, or this size itself."""
    if held or (is_size(size) and size < 0):
        return _made(node, local_size, size, ranks, held) if isinstance(size, fx.Node) else local_size(size, ranks, held)
    return _beside(node, operator.floordiv, size, ranks)


def _beside(node: fx.Node, function: Any, value: Any, ranks: int) -> Any:
    """Return a node for a number computed from a node's size, or the number itself."""
    return _made(node, function, value, ranks) if isinstance(value, fx.Node) else function(value, ranks)


def _made(node: fx.Node, function: Any, *args: Any) -> fx.Node:
    made = node.graph.call_function(function, args)
    made.meta.update({key: node.meta[key] for key in ("source", "module", "regions", "is_rewrite") if key in node.meta})
    return made
