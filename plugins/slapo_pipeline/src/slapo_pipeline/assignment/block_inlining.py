"""The flat graph of a model and which stage runs what: finer where blocks hand on more than one value.

A block stays whole as a rule, and what it returns is sent. Where several of its results cross a boundary, some may follow from
the batch, or from a small table in the block, as T5's position bias does: then all blocks of the kind are taken apart, each
stage makes those values for itself, and the table is a tied parameter. That is done if it makes fewer bytes cross.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
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
"""Larger embeddings are not held by several stages."""


class DividedGraph(NamedTuple):
    """A flat graph and how it is divided.

    Args:
        traced: The graph.
        parts: Which stage runs what.
    """

    traced: TracedModule
    parts: Assignment

    @property
    def sent(self) -> int:
        """Bytes that cross all boundaries, forward and backward."""
        return sum(
            node_bytes(node) * (1 + node.meta["val"].requires_grad) for received in self.parts.received for node in received
        )


def divide_graph(root: nn.Module, traced: TracedModule, cuts: Sequence[str], apart: Collection[str] = ()) -> DividedGraph:
    """A flat graph, divided at the cuts.

    Args:
        root: The model.
        traced: Its flat graph.
        cuts: Paths of the modules that end a stage.
        apart: Paths of the modules that were taken apart for it.

    Raises:
        ScheduleError: a cut leaves a stage without anything to run.
        TraceError: something that is no tensor would have to cross.
    """
    positions = [position for position, _ in cut_positions(root, traced.graph, cuts)]
    return DividedGraph(traced, Assigner(traced.graph, root, positions, _small_embeddings(root, apart)).run())


def with_inlined_blocks(
    root: nn.Module, inputs: Mapping[str, Any], cuts: Sequence[str], coarse: DividedGraph
) -> DividedGraph | None:
    """The same with blocks taken apart; None where that is of no use."""
    apart = sorted(_inlinable_modules_like(root, _modules_with_several_crossing_values(coarse.parts)))
    if not apart:
        return None
    try:
        found = divide_graph(root, trace_flat(root, inputs, cuts, apart), cuts, apart)
    except SlapoError:
        return None  # it can be cut with its blocks whole
    return found if found.sent < coarse.sent else None


def _modules_with_several_crossing_values(parts: Assignment) -> set[str]:
    """Paths of the modules of which more than one value crosses a boundary."""
    found: set[str] = set()
    for received in parts.received:
        sources = Counter(source for node in received if (source := _source_module(node)))
        found |= {source for source, times in sources.items() if times > 1}
    return found


def _source_module(node: fx.Node) -> str | None:
    """Path of the module whose result the node is a part of."""
    while is_container_item(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return str(node.target) if node.op == "call_module" else None


def _inlinable_modules_like(root: nn.Module, paths: Collection[str]) -> Iterator[str]:
    """Paths of all modules of the classes that these have; those that are wrapped, or recompute themselves, stay whole."""
    kinds = {type(root.get_submodule(path)) for path in paths}
    return (path for path, module in root.named_modules() if type(module) in kinds and _can_be_inlined(module))


def _can_be_inlined(module: nn.Module) -> bool:
    return is_custom(module) and not is_opaque(module) and not getattr(module, "gradient_checkpointing", False)


def _small_embeddings(root: nn.Module, apart: Collection[str]) -> set[str]:
    """Paths of the small embeddings inside of these modules."""
    return {
        f"{path}.{name}"
        for path in apart
        for name, module in root.get_submodule(path).named_modules()
        if type(module) is nn.Embedding
        and not is_opaque(module)
        and module.max_norm is None
        and not (module.sparse or module.scale_grad_by_freq)
        and module.weight.nbytes <= _MAX_SHARED_EMBEDDING_BYTES
    }
