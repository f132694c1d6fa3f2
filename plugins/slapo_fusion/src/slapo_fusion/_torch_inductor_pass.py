"""Private torch API: a custom pass of inductor over its graphs; imported when a region needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from .cpu_operators import custom_operator


def options(inlined: Mapping[Any, Callable[..., Any]]) -> dict[str, Any]:
    """Return options of inductor by which it inlines custom operations as these functions of the same arguments.

    The pass runs after the partition into forward and backward, in which each operation is opaque: its results are saved rather
    than recomputed. A product and a sum may be rounded once, together. Sums over rows on a CPU, as for a bias's gradient, use
    torch's own kernel: the compiler's goes column by column.
    """
    return {"post_grad_custom_pre_pass": InlinePass(inlined), "cpp.enable_floating_point_contract_flag": "fast"}


class InlinePass(CustomGraphPass):
    """Pass that inlines functions for custom operations and replaces sums over rows, in one graph of the compiler."""

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        self.functions = dict(functions)

    def __call__(self, graph: fx.Graph) -> None:
        for operation, function in self.functions.items():
            for node in graph.find_nodes(op="call_function", target=operation):
                _inline(graph, node, function)
        _replace_row_sums(graph)

    def uuid(self) -> Any:
        """Return the key of this pass in the compiler's cache."""
        return get_hash_for_files((__file__, *sorted({each.__code__.co_filename for each in self.functions.values()})))


def _inline(graph: fx.Graph, node: fx.Node, function: Callable[..., Any]) -> None:
    """Replace a node of an operation with several result tensors by the operations of a function."""
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


def _row_sum(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    return x.sum(tuple(dim), keepdim)


_sum = custom_operator("sum", _row_sum, tags=(torch.Tag.needs_exact_strides,))


def _replace_row_sums(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList):
        given: Any = node.args
        x, dim = given[0].meta["val"], given[1] or []
        is_over_rows = sorted(dim) == list(range(len(dim))) and 0 < len(dim) < x.dim()
        if is_over_rows and x.device.type == "cpu" and not node.kwargs:
            node.target = torch.ops.slapo.sum.default
