"""The one place that knows a pass of torch's compiler over the graphs it makes; imported when a region needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx


def options(inlined: Mapping[Any, Callable[..., Any]]) -> dict[str, Any]:
    """Of inductor, for regions with operations that it is to fuse as these functions of the same arguments.

    Until then, while forward and backward are divided, each is one operation, whose results are kept and not computed again. A
    product and a sum may be rounded once, together. What sums a CPU's tensors over rows, as a bias's gradient does, is torch's
    own kernel: the compiler's goes down column by column.
    """
    return {"post_grad_custom_pre_pass": Inlined(inlined), "cpp.enable_floating_point_contract_flag": "fast"}


class Inlined(CustomGraphPass):
    """Functions in the place of operations, and sums over rows apart, in one graph of the compiler."""

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        self.functions = dict(functions)

    def __call__(self, graph: fx.Graph) -> None:
        """In place."""
        for operation, function in self.functions.items():
            for node in graph.find_nodes(op="call_function", target=operation):
                _inline(graph, node, function)
        _sums_apart(graph)

    def uuid(self) -> Any:
        """For the compiler's cache."""
        return get_hash_for_files((__file__, *sorted({each.__code__.co_filename for each in self.functions.values()})))


def _inline(graph: fx.Graph, node: fx.Node, function: Callable[..., Any]) -> None:
    """Of an operation on tensors that gives several of them."""
    inputs: Any = node.args
    examples = [each.meta["val"] for each in inputs]
    with examples[0].fake_mode:
        traced = make_fx(function, decomposition_table=select_decomp_table())(*examples).graph
    given = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.inserting_before(node):
        results: Any = graph.graph_copy(traced, given)
    for use in list(node.users):
        use.replace_all_uses_with(results[use.args[1]])
        graph.erase_node(use)
    graph.erase_node(node)
    graph.eliminate_dead_code()


@torch.library.custom_op("slapo::sum", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def _sum(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    return x.sum(tuple(dim), keepdim)


@_sum.register_fake
def _(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    return x.sum(tuple(dim), keepdim)


def _sums_apart(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList):
        given: Any = node.args
        x, dim = given[0].meta["val"], given[1] or []
        is_over_rows = sorted(dim) == list(range(len(dim))) and 0 < len(dim) < x.dim()
        if is_over_rows and x.device.type == "cpu" and not node.kwargs:
            node.target = torch.ops.slapo.sum.default
