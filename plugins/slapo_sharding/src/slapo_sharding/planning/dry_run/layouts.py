"""Dry run of a traced graph with DTensors as types, to find the values that a split of some layers shards.

Nothing is computed and nothing is sent. Values live on the meta device: a sharded value is a DTensor, any other value is
replicated. DTensor's rules propagate the layouts. An operation that would have to move data ends the run.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.func import functional_call
from torch.utils import _pytree as pytree

from slapo_core import TraceError
from slapo_tracing.nodes import expect, function_name, set_state

from ...communication._torch_private import no_redistribution
from ...rules.convolutions import channel_dim
from ...rules.norms import counts_channels_only, has_batch
from ...syncs.sharded_norms import norm_of
from .function_probe import check_on_random_shards, is_autograd_function, probe_operator
from .fused_outputs import FusedOutput, propagate_fused
from .layout_adaptation import in_full_precision, may_reduce, run_on_cut_values
from .layout_error import NOT_DIVISIBLE, LayoutError
from .node_values import (
    UnknownObject,
    as_meta,
    has_gradient,
    holds_tensors,
    parameters_of,
    returns_float_tensors,
    returns_several_tensors,
    run_by_heads,
)
from .parallel_branches import Branches
from .size_arguments import leaves, record_divided_arguments, record_sizes_to_divide
from .split_specs import LayerSplit, ParameterSplit

_CALLED_BOTH_WAYS = "the layer is called with a sharded input and with a whole one"
_VIEWS = ("view", "reshape", "unflatten")
_GRADIENT_PROPERTIES = ("is_grad_enabled", "requires_grad", "is_leaf")


class Layouts(fx.Interpreter):
    """Dry run of a graph.

    Args:
        graph_module: Traced module, or the module that ``graph`` belongs to. Its layers are whole.
        mesh: Tensor-parallel group as a mesh of one dimension.
        candidates: Path of a layer to its split if its input is replicated. Other layers stay whole then.
        sharded_fills: Nodes that fill a tensor with one number, to the dimension along which each rank makes its shard only.
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
        sharded_fills: Mapping[fx.Node, int],
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

    def check(self) -> None:
        """Run the graph.

        Raises:
            LayoutError: an operation does not fit, or a result of the graph is sharded and may not be.
        """
        with torch.no_grad(), torch.device("meta"), no_redistribution():
            self.run()

    def run_node(self, n: fx.Node) -> Any:
        if n.target is set_state:
            return None  # no node reads attributes of an object
        if n.target is expect and (n.args[1] in _GRADIENT_PROPERTIES or (n.args[1] == "shape" and not self.returns_shards)):
            return None  # it guards runs with gradients or of the unmodified model, not this one
        if n.target is torch.autograd.grad:
            raise TraceError(
                "the forward calls torch.autograd.grad, and the layout of the gradients it returns is not known; "
                "keep the module that calls it whole",
                source=n.meta.get("source"),
                failing_module=n.meta.get("module"),
            )
        args, kwargs = self.fetch_args_kwargs_from_env(n) if n.op not in ("placeholder", "get_attr") else ((), {})
        if n in self.branch_of or n in self.joint_branches:
            return self._branch_node(n, args, kwargs)
        is_sharded = any(True for _ in _sharded_leaves((args, kwargs)))
        if not is_sharded and self.replicated_parts.isdisjoint(n.all_input_nodes):
            return self._replicated_node(n, args, kwargs)
        self.sources[n] = frozenset[str]().union(*(self.sources.get(other, frozenset()) for other in n.all_input_nodes))
        try:
            value = self._sharded_node(n, args, kwargs) if is_sharded else self._replicated_part_node(n, args, kwargs)
        except ValueError as err:
            raise LayoutError(self, n, str(err)) from err
        except Exception as err:  # DTensor's rules raise errors of many types
            raise LayoutError(self, n, self._reason_against(n)) from err
        value = self._record_value(n, self._as_fused(n, value))
        if isinstance(value, DTensor) and n.op != "call_module":
            record_sizes_to_divide(self, n, value, args, kwargs)
        return value

    def _as_fused(self, n: fx.Node, value: Any) -> Any:
        """Record values computed from parameters alone, and return the result of a fused projection as a ``FusedOutput``."""
        if n.op.startswith("call") and n.all_input_nodes and {*n.all_input_nodes} <= self.weights:
            self.weights.add(n)
        blocks = self.blocks_of(n)
        if not blocks or not isinstance(value, DTensor):
            return value
        if n in self.weights:
            self.blocks[n] = blocks
            return value
        (placement,) = value.placements
        if not isinstance(placement, Shard) or value.shape[placement.dim] != sum(blocks):
            raise LayoutError(self, n, "the parts of a fused projection are used together")
        return self._record_fused(n, FusedOutput(as_meta(n.meta["val"]), blocks, placement.dim))

    def blocks_of(self, n: fx.Node) -> tuple[int, ...]:
        """Return the block sizes of the fused parameter, or a value computed from one, that enters a node; empty for none."""
        return next((self.blocks[other] for other in n.all_input_nodes if other in self.blocks), ())

    def _reason_against(self, n: fx.Node) -> str:
        value, given = n.meta.get("val"), n.all_input_nodes[0].meta.get("val")
        if function_name(n) in _VIEWS and isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor):
            number, size = value.shape[-2:] if value.dim() > 1 else (0, 0)
            if value.dim() == given.dim() + 1 and number * size == given.shape[-1] and number % self.mesh.size():
                return f"{number} heads, or whatever has size {size} here, are {NOT_DIVISIBLE} {self.mesh.size()} ranks"
        return "the operation needs all of a value that is sharded"

    def _branch_node(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Run a node of a branch on whole values; the node that joins the branches returns a shard."""
        if any(True for _ in _sharded_leaves((args, kwargs))):
            given = (self.sources.get(other, frozenset()) for other in n.all_input_nodes)
            self.sources[n] = frozenset[str]().union(*given)
            raise LayoutError(self, n, "a branch is given a sharded value")
        if n in self.joint_branches:
            branches = self.joint_branches[n]
            self.sources[n] = frozenset(branches.splits(self.mesh.size()))
            return self._record_value(n, self.shard(as_meta(n.meta["val"]), branches.dim))
        branches = self.branch_of[n]
        if n in branches.entries or returns_float_tensors(n):
            self._record_uses(n, branches.external_inputs(n))
        if n in branches.shared:
            self._record_partial(n, None, branches.shared[n])
        return self._replicated_node(n, args, kwargs)

    def _replicated_node(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        is_layer = n.op == "call_module" and n not in self.branch_of
        split = self.candidates.get(str(n.target)) if is_layer else None
        if is_layer and split is None:
            self._record_whole_call(n, str(n.target))
        if split is not None:
            self.sources[n] = frozenset((str(n.target),))
            self._record_split(str(n.target), split)
            whole = as_meta(n.meta["val"])
            dim = channel_dim(self.fetch_attr(str(n.target))) % whole.dim()
            try:
                if split.blocks:
                    return self._record_fused(n, FusedOutput(whole, split.blocks, dim, split.replicated))
                return self._record_value(n, self.shard(whole, dim))
            except ValueError as err:
                raise LayoutError(self, n, str(err)) from err
        given = self.parameters.get(str(n.target)) if n.op == "get_attr" else None
        if given is not None and given.owner is None:
            return self._sharded_parameter(n, given)
        if isinstance(known := n.meta.get("val"), torch.Tensor):
            if n in self.sharded_fills:
                self.sources[n] = frozenset()
                self.sizes_to_divide[n] = (known.shape[self.sharded_fills[n]],)
                value = self.shard(as_meta(known), self.sharded_fills[n])
                record_divided_arguments(self, n, (args, kwargs), value.to_local().shape)
                return self._record_value(n, value)
            return as_meta(known)
        if n.op == "placeholder":
            return n.meta.get("val")
        if n.target in (getattr, operator.getitem) and args[0] is None:  # an attribute or item of an argument that is None here
            return UnknownObject()
        if n.op == "call_module" and str(n.target) in self.opaque:
            return UnknownObject()
        try:
            value = self.call_on_meta(n, args, kwargs) if n.op == "call_module" else getattr(self, n.op)(n.target, args, kwargs)
        except NotImplementedError:
            self.data_dependent_nodes.append(n)
            return UnknownObject()
        return pytree.tree_map_only(torch.Tensor, as_meta, value)

    def _sharded_parameter(self, n: fx.Node, split: ParameterSplit) -> DTensor:
        self.sources[n] = frozenset((str(n.target),))
        self.weights.add(n)
        if split.blocks:
            self.blocks[n] = split.blocks
        try:
            if any(block % self.mesh.size() for block in split.blocks):
                raise ValueError(f"blocks {split.blocks} are {NOT_DIVISIBLE} {self.mesh.size()} ranks")
            value: DTensor = self._record_value(n, self.shard(as_meta(n.meta["val"]), split.dim))
        except ValueError as err:
            raise LayoutError(self, n, str(err)) from err
        return value

    def _record_fused(self, n: fx.Node, fused: FusedOutput) -> FusedOutput:
        self.local_shapes[n] = tuple(fused.local_value(self.mesh.size()).shape)
        return fused

    def _selected_part(self, n: fx.Node, value: Any) -> Any:
        """Record the part that is taken out of a value: sharded, replicated, or fused itself."""
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and has_gradient(n):
            self.replicated_parts.add(n)
        return self._record_fused(n, value) if isinstance(value, FusedOutput) else value

    def _replicated_part_node(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Run a node on replicated parts of fused outputs, whose gradient is partial."""
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if n.op == "output" or (module is not None and (str(n.target) in self.opaque or self.is_layer(module))):
            raise ValueError("a part of a fused output that every rank holds whole is used for all heads together")
        if module is not None:
            self._record_partial(n, None, self.parameter_names(str(n.target)))
        self._record_inputs(n)
        value, given = self._replicated_node(n, args, kwargs), self.sources.pop(n)
        if has_gradient(n) or returns_several_tensors(n):
            self.replicated_parts.add(n)
            self.sources[n] = given
        return value

    def _sharded_node(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        args, kwargs = in_full_precision((args, kwargs))
        if n.op == "output" and self.returns_shards:
            return args[0]
        if n.op == "output":
            raise ValueError("a sharded value is a result of the model")
        if n.target is operator.getitem and isinstance(args[0], list):
            return self._selected_part(n, args[0][args[1]])
        fused = next((value for value in _sharded_leaves((args, kwargs)) if isinstance(value, FusedOutput)), None)
        if fused is not None:
            return self._selected_part(n, propagate_fused(self, n, fused, args, kwargs))
        if n.meta.get("mutates") and not isinstance(args[0], DTensor):
            raise ValueError("a replicated value is changed with a sharded one")
        if n in self.adapted_nodes and (n.op != "call_module" or norm_of(self.fetch_attr(str(n.target))) is not None):
            value = self._adapted_node(n, args, kwargs)
            if n.op != "call_module" or n in self.norms:
                self._record_inputs(n)
                return value
        self._record_inputs(n)
        if n.op == "call_module":
            return self._module_node(n, args, kwargs)
        return self.call_node(n, args, kwargs)

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

    def _adapted_node(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        try:
            return self.call_node(n, args, kwargs) if n.op != "call_module" else self.call_on_meta(n, args, kwargs)
        except RuntimeError:
            return run_on_cut_values(self, n, args, kwargs)

    def _module_node(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        path = str(n.target)
        module = self.fetch_attr(path)
        by_channel = counts_channels_only(module) and isinstance(args[0], DTensor) and has_batch(module, args[0].dim())
        if by_channel and args[0].placements == (Shard(1),):
            return self.shard(as_meta(n.meta["val"]), 1)
        if path in self.opaque:
            raise ValueError(f"{path!r}, which cannot be traced, needs all of a value that is sharded")
        if not self.is_layer(module):
            names = self.parameter_names(path)
            if any(name in self.reduced_per_use for name in names):
                raise ValueError(
                    f"parameters of {path!r} are used on whole values too, and one reduction of their gradient serves all uses"
                )
            self._record_partial(n, None, names)
            return self.call_on_meta(n, args, kwargs)
        keeps = self.is_layer(module, "kept") and holds_tensors(module)
        if not keeps and not self.is_layer(module, "partial"):
            raise ValueError(f"the layer {path!r}, which cannot be split along its input, needs all of a value that is sharded")
        x = args[0] if args else next(iter(kwargs.values()))
        dim = channel_dim(module) % x.dim()
        if x.placements != (Shard(dim),) or module in self.replicated_modules:
            along = ", ".join(str(getattr(placement, "dim", placement)) for placement in x.placements)
            given = f"the layer {path!r} has an input of shape {list(x.shape)} that is split along dimension {along}"
            raise ValueError(f"{given}, and a layer needs it whole or split along its last dimension,")
        self.sharded_calls[n] = self.sources[n]
        if keeps:
            self._record_split(path, LayerSplit("kept"))
            return self.shard(as_meta(n.meta["val"]), dim)
        self._record_split(path, LayerSplit("reduced"))
        self.sources.pop(n)
        return as_meta(n.meta["val"])

    def call_on_meta(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Call a module with its whole parameters and buffers as meta tensors."""
        module = self.fetch_attr(str(n.target))
        state = {name: as_meta(value) for name, value in [*module.named_parameters(), *module.named_buffers()]}
        return functional_call(module, state, args, kwargs)

    def parameter_names(self, path: str) -> list[str]:
        """Return the names of the parameters of a module, with those of its children."""
        return [f"{path}.{name}" for name, _ in self.fetch_attr(path).named_parameters()]

    def _record_whole_call(self, n: fx.Node, path: str) -> None:
        self.called_whole.add(path)
        if path in self.splits:
            of = next(other for other in self.graph.find_nodes(op="call_module", target=path) if other in self.sharded_calls)
            self.sources[n] = self.sharded_calls[of]
            raise LayoutError(self, n, _CALLED_BOTH_WAYS)

    def _record_split(self, path: str, split: LayerSplit) -> None:
        if self.splits.setdefault(path, split) != split or path in self.called_whole:
            raise ValueError(_CALLED_BOTH_WAYS)

    def _record_inputs(self, n: fx.Node) -> None:
        """Record the uses of replicated inputs, whose gradient is partial where each rank uses them on its shard."""
        if returns_float_tensors(n):
            self._record_uses(n, n.all_input_nodes)

    def _record_uses(self, n: fx.Node, given: Iterable[fx.Node]) -> None:
        for other in given:
            if other in self.sources or other in self.partial_gradients:
                continue
            if self._is_written(other):
                raise ValueError(f"the whole value {other.name!r}, which is written in place, has a partial gradient")
            if not has_gradient(other) or self._is_added_once(n, other):
                continue
            names = parameters_of(other) if n not in self.branch_of else ()
            owners = {name.rpartition(".")[0] for name in names}
            if names and owners.isdisjoint(self.parameter_owners) and not any(map(self.reduced_per_use.__contains__, names)):
                self._record_partial(n, other, names)
            elif (n in self.adapted_nodes and not self.cuts_only) or n in self.branch_of:
                self.reduced_gradients.setdefault(n, set()).add(other)
            else:
                raise ValueError(f"the whole value {other.name!r} has a partial gradient")

    def _is_added_once(self, n: fx.Node, other: fx.Node) -> bool:
        values, counted_once = leaves((n.args, n.kwargs)), self.first_rank_values.get(n)
        return [index for index, value in enumerate(values) if value is other] == [counted_once]

    def _is_written(self, node: fx.Node) -> bool:
        """Return whether a value has a gradient because one was written into its memory in place."""
        value = node.meta.get("val")
        is_number = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        return is_number and "memory" in node.meta and node.meta["memory"] in self._written_memories

    @cached_property
    def _written_memories(self) -> set[Any]:
        found = set()
        for node in self.graph.nodes:
            given = node.all_input_nodes
            if any(map(has_gradient, given)):
                found |= {given[place].meta.get("memory") for place in node.meta.get("mutates") or ()}
        return found - {None}

    def _record_partial(self, n: fx.Node, other: fx.Node | None, names: list[str]) -> None:
        self.partial_parameters.update(dict.fromkeys(names, n))
        self.partial_uses.append((n, other, names))

    def shard(self, whole: torch.Tensor, dim: int) -> DTensor:
        size = self.mesh.size()
        if whole.shape[dim] % size:
            raise ValueError(f"size {whole.shape[dim]} is {NOT_DIVISIBLE} {size} ranks")
        placements: list[Placement] = [Shard(dim)]
        local = torch.empty_like(whole.chunk(size, dim)[0])  # dense, like the output of a layer
        return DTensor.from_local(local, self.mesh, placements, run_check=False)

    def _record_value(self, n: fx.Node, value: Any) -> Any:
        for part in _sharded_leaves(value):
            if isinstance(part, DTensor) and isinstance(placement := part.placements[0], Partial):
                is_sum = type(placement) is Partial and placement.reduce_op in ("sum", "avg")
                if part is value and is_sum and n in self.adapted_nodes and not self.cuts_only and may_reduce(self, n):
                    self.sources.pop(n)
                    self.reductions[n] = placement.reduce_op
                    return part.to_local()
                raise LayoutError(self, n, "its result is a partial value")
        if isinstance(value, DTensor):
            if value.placements[0].is_replicate():
                self.sources.pop(n, None)
                return value.to_local()
            self.local_shapes[n] = tuple(value.to_local().shape)
        elif isinstance(value, torch.Tensor) and n not in self.replicated_parts:
            self.sources.pop(n, None)  # only metadata of a sharded value was used, as of size()
        return value

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return as_meta(value) if isinstance(value, torch.Tensor) else value


def _sharded_leaves(value: Any) -> Iterator[Any]:
    return (part for part in pytree.tree_leaves(value) if isinstance(part, (DTensor, FusedOutput)))
