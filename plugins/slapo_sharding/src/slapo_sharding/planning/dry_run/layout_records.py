"""State of a dry run: the splits that it is given, and what it finds at each node of the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.func import functional_call

from slapo_tracing.nodes import function_name

from .function_probe import check_on_random_shards, is_autograd_function, probe_operator
from .node_values import as_meta, run_by_heads
from .parallel_branches import Branches
from .sharded_fills import ShardedFill
from .split_specs import LayerSplit, ParameterSplit

NOT_DIVISIBLE = "not divisible by"
"""Words in the reason for which a size or a number of heads is not split."""


class LayoutError(Exception):
    """Error of a node that cannot run on values with these layouts.

    Args:
        layouts: Dry run.
        node: Node that failed. ``sources`` are the layers whose sharded outputs reach it.
        reason: Reason, as the start of a sentence.
    """

    def __init__(self, layouts: LayoutRecords, node: fx.Node, reason: str) -> None:
        self.layouts, self.node, self.sources = layouts, node, layouts.sources.get(node, frozenset())
        where = f" ({source})" if (source := node.meta.get("source")) else ""
        super().__init__(f"{reason} at {node.name}{where}")

    def sharded_dims(self) -> set[tuple[int, int]]:
        """Return the dimensions along which the node's inputs are sharded, counted from the end, with their whole sizes."""
        found = set()
        for other in self.node.all_input_nodes:
            value, local = other.meta.get("val"), self.layouts.local_shapes.get(other)
            if isinstance(value, torch.Tensor) and local is not None:
                parts = enumerate(zip(value.shape, local, strict=True), -value.dim())
                found |= {(dim, size) for dim, (size, part) in parts if size != part}
        return found


class LayoutRecords(fx.Interpreter):
    """State of the dry run of a graph.

    Args:
        graph_module: Traced module, or the module that ``graph`` belongs to. Its layers are whole.
        mesh: Tensor-parallel group as a mesh of one dimension.
        candidates: Path of a layer to its split if its input is replicated. Other layers stay whole then.
        sharded_fills: Nodes that make a tensor without data of a shard, such as zeros, to how each rank makes its shard only.
        is_layer: Returns whether a module can be split, or with a second argument whether its output can be ``"sharded"``,
            ``"partial"`` or ``"kept"``.
        replicated_modules: Modules that are never split.
        graph: Graph to run. None for that of the traced module.
        adapted_nodes: Nodes that may cut a whole value, or reduce its gradient, where it meets sharded values.
        returns_shards: Whether results of the graph may be sharded.
        opaque: Paths of modules that cannot be traced. They accept whole values only.
        parameters: Name of each split parameter that a forward uses directly, to its split.
        shared: Whole layers and parameters whose results may meet sharded values.
        cuts_inputs: Whether graph inputs with gradients may be cut as parameters are.
        branches: Branches that ranks run some each.
        reduced_per_use: Names of whole parameters with whole uses as well. Each sharded use has its gradient summed by itself.
        cuts_only: Adapted nodes only cut parameters and constants, so that nothing is sent.

    Attributes:
        splits: Split of each layer. Other layers stay whole.
        local_shapes: Shapes of sharded values on one rank.
        sources: Layers that the sharding of a value comes from.
        partial_parameters: Replicated parameters with a partial gradient, by name, to a node that uses them on sharded values.
        partial_uses: Uses of such parameters: the node, the value computed from them or None, and their names.
        sizes_to_divide: Whole sizes among a node's arguments that must be divided for it to run on a shard.
        divided_arguments: Leaf indices of these sizes in the arguments, to the elements of each that all ranks hold.
        cut_arguments: Leaf indices of whole arguments that are cut, to the dimension.
        cut_blocks: Block sizes of arguments that are cut block by block.
        reduced_gradients: Whole values that a node uses on each rank's shard. Their gradients are summed.
        weights: Nodes computed from split parameters alone.
        parameter_owners: Paths of the modules that hold these parameters.
        joint_branches: Branches by the node that joins them.
        branch_of: Branches by each node inside them.
        reductions: Nodes whose partial result is reduced at once, to ``"sum"`` or ``"avg"``.
        norms: Norms and variances over the sharded dimension. Their statistics are reduced.
        called_whole: Paths of modules that are called with whole values and are not split there.
        sharded_calls: Calls of layers with sharded inputs, to the sources of these.
        data_dependent_nodes: Nodes whose result shapes follow from data.
        first_rank_values: Nodes whose partial results are summed, to the leaf index of the whole argument that counts once.
        local_arguments: Leaves of a node's arguments on one rank, for nodes that take parts out of fused outputs.
        replicated_parts: Nodes whose value every rank holds whole with a partial gradient: parts of fused outputs.
    """

    def __init__(
        self,
        graph_module: nn.Module,
        mesh: DeviceMesh,
        candidates: Mapping[str, LayerSplit],
        sharded_fills: Mapping[fx.Node, ShardedFill],
        is_layer: Any,
        replicated_modules: Collection[nn.Module] = (),
        graph: fx.Graph | None = None,
        adapted_nodes: Collection[fx.Node] = (),
        returns_shards: bool = False,
        opaque: Collection[str] = (),
        parameters: Mapping[str, ParameterSplit] | None = None,
        shared: Collection[str] = (),
        cuts_inputs: bool = False,
        branches: Collection[Branches] = (),
        reduced_per_use: Collection[str] = (),
        cuts_only: bool = False,
    ) -> None:
        super().__init__(graph_module, graph=graph)
        self.cuts_inputs, self.reduced_per_use, self.cuts_only = cuts_inputs, reduced_per_use, cuts_only
        self.joint_branches = {each.joint: each for each in branches}
        self.branch_of = {node: each for each in branches for node in each.all_nodes}
        self.adapted_nodes, self.returns_shards, self.opaque = adapted_nodes, returns_shards, opaque
        self.extra_traceback = False  # the search only reads the message
        self.traced, self.mesh, self.is_layer = graph_module, mesh, is_layer
        self.candidates, self.sharded_fills, self.replicated_modules = candidates, sharded_fills, replicated_modules
        self.splits: dict[str, LayerSplit] = {}
        self.local_shapes: dict[fx.Node, tuple[int, ...]] = {}
        self.sources: dict[fx.Node, frozenset[str]] = {}
        self.partial_parameters: dict[str, fx.Node] = {}
        self.partial_uses: list[tuple[fx.Node, fx.Node | None, list[str]]] = []
        self.sizes_to_divide: dict[fx.Node, tuple[int, ...]] = {}
        self.divided_arguments: dict[fx.Node, dict[int, int]] = {}
        self.cut_arguments: dict[fx.Node, dict[int, int]] = {}
        self.cut_blocks: dict[fx.Node, tuple[int, ...]] = {}
        self.reduced_gradients: dict[fx.Node, set[fx.Node]] = {}
        self.parameters, self.shared = parameters or {}, shared
        self.parameter_owners = {name.rpartition(".")[0] for name, split in self.parameters.items() if split.owner is None}
        self.weights, self.replicated_parts = set[fx.Node](), set[fx.Node]()
        self.blocks: dict[fx.Node, tuple[int, ...]] = {}
        self.reductions: dict[fx.Node, str] = {}
        self.norms: set[fx.Node] = set()
        self.first_rank_values: dict[fx.Node, int] = {}
        self.local_arguments: dict[fx.Node, list[Any]] = {}
        self.called_whole: set[str] = set()
        self.sharded_calls: dict[fx.Node, frozenset[str]] = {}
        self.data_dependent_nodes: list[fx.Node] = []
        # filled by SequenceLayouts
        self.partial_gradients: dict[fx.Node, Any] = {}
        self.sequence_collectives: Mapping[tuple[str, str], Any] = {}
        self.input_gradient_reduced: dict[str, bool] = {}
        self.scatter_axes: dict[str, int] = {}

    def blocks_of(self, n: fx.Node) -> tuple[int, ...]:
        """Return the block sizes of the fused parameter, or a value computed from one, that enters a node; empty for none."""
        return next((self.blocks[other] for other in n.all_input_nodes if other in self.blocks), ())

    def shard(self, whole: torch.Tensor, dim: int) -> DTensor:
        size = self.mesh.size()
        if whole.shape[dim] % size:
            raise ValueError(f"size {whole.shape[dim]} is {NOT_DIVISIBLE} {size} ranks")
        placements: list[Placement] = [Shard(dim)]
        local = torch.empty_like(whole.chunk(size, dim)[0])  # dense, like the output of a layer
        return DTensor.from_local(local, self.mesh, placements, run_check=False)

    def call_node(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        if n.target is torch.cat:  # DTensor's rule for cat fails on empty tensors
            args = ([value for value in args[0] if value.numel()], *args[1:])
        try:
            value = getattr(self, n.op)(n.target, args, kwargs)
            if is_autograd_function(n.target):
                check_on_random_shards(n.target, args, kwargs, value, self.mesh.size())
            return value
        except NotImplementedError:
            return probe_operator(n, args, kwargs, self.mesh)
        except RuntimeError:
            return run_by_heads(function_name(n), args, kwargs)

    def call_on_meta(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Call a module with its whole parameters and buffers as meta tensors."""
        module = self.fetch_attr(str(n.target))
        state = {name: as_meta(value) for name, value in [*module.named_parameters(), *module.named_buffers()]}
        return functional_call(module, state, args, kwargs)

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return as_meta(value) if isinstance(value, torch.Tensor) else value
