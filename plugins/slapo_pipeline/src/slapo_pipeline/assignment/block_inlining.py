"""The division of a flat graph into stages, with blocks inlined where that sends fewer bytes.

A block is one node as a rule, and its results are sent. If several results cross a boundary, some may be computable from the
batch, or from a small embedding inside the block, as T5's position bias is. Then all blocks of that class are inlined, each
stage computes those values itself, and the embedding becomes a tied parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx, nn

from slapo_core import SlapoError
from slapo_tracing.graphs import TracedModule
from slapo_tracing.nodes import is_opaque

from ..tracing.flat_trace import cut_positions, is_custom, trace_flat
from .alias_analysis import is_container_item
from .min_cut import node_bytes
from .node_assignment import Assigner, Assignment

_MAX_SHARED_EMBEDDING_BYTES = 1 << 20
"""Embeddings with more bytes are held by one stage only."""


class DividedGraph(NamedTuple):
    """A flat graph and its assignment to stages."""

    traced: TracedModule
    assignment: Assignment

    @property
    def boundary_bytes(self) -> int:
        """Bytes that cross all boundaries, forward and backward."""
        return sum(
            node_bytes(node) * (1 + node.meta["val"].requires_grad)
            for received in self.assignment.received
            for node in received
        )


def divide_graph(root: nn.Module, traced: TracedModule, cuts: Sequence[str], inlined: Collection[str] = ()) -> DividedGraph:
    """Divide a flat graph, in which some blocks may be inlined, at the cuts.

    Raises:
        ScheduleError: a cut leaves a stage with no node to run.
        TraceError: a value that is not a tensor would have to cross a boundary.
    """
    positions = [position for position, _ in cut_positions(root, traced.graph, cuts)]
    return DividedGraph(traced, Assigner(traced.graph, root, positions, _small_embeddings(root, inlined)).run())


def with_inlined_blocks(
    root: nn.Module, inputs: Mapping[str, Any], cuts: Sequence[str], coarse: DividedGraph, any_values: bool = False
) -> DividedGraph | None:
    """Return the division of the model with blocks inlined, or None if it sends no fewer bytes than ``coarse``."""
    kinds = {type(root.get_submodule(path)) for path in _modules_with_several_crossing_values(coarse.assignment)}
    inlined = sorted(path for path, module in root.named_modules() if type(module) in kinds and _can_be_inlined(module))
    if not inlined:
        return None
    try:
        found = divide_graph(root, trace_flat(root, inputs, cuts, inlined, any_values), cuts, inlined)
    except SlapoError:
        return None  # the division with whole blocks is valid
    return found if found.boundary_bytes < coarse.boundary_bytes else None


def _modules_with_several_crossing_values(assignment: Assignment) -> set[str]:
    """Return the paths of the modules with more than one result that crosses the same boundary."""
    found: set[str] = set()
    for received in assignment.received:
        sources = Counter(source for node in received if (source := _source_module(node)))
        found |= {source for source, times in sources.items() if times > 1}
    return found


def _source_module(node: fx.Node) -> str | None:
    """Return the path of the module whose result the node is, or is an item of."""
    while is_container_item(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return str(node.target) if node.op == "call_module" else None


def _can_be_inlined(module: nn.Module) -> bool:
    # Transformers' own recomputation and wrappers act on the module's forward, which a graph would bypass
    return is_custom(module) and not is_opaque(module) and not getattr(module, "gradient_checkpointing", False)


def _small_embeddings(root: nn.Module, inlined: Collection[str]) -> set[str]:
    """Return the paths of the small embeddings inside these modules."""
    return {
        f"{path}.{name}"
        for path in inlined
        for name, module in root.get_submodule(path).named_modules()
        if type(module) is nn.Embedding
        and not is_opaque(module)
        and module.max_norm is None
        and not (module.sparse or module.scale_grad_by_freq)
        and module.weight.nbytes <= _MAX_SHARED_EMBEDDING_BYTES
    }
