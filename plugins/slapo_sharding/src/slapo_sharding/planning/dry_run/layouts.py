"""Dry run of a traced graph with DTensors as types, to find the values that a split of some layers shards.

Nothing is computed and nothing is sent. Values live on the meta device: a sharded value is a DTensor, any other value is
replicated. DTensor's rules propagate the layouts. An operation that would have to move data ends the run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils import _pytree as pytree

from slapo_core import TraceError
from slapo_tracing.nodes import expect, function_name, set_state

from ...communication._torch_private import no_redistribution
from ...rules.channels import channel_dim, counts_channels_only, has_batch
from ...syncs.sharded_norms import norm_of
from .fused_outputs import FusedOutput, propagate_fused
from .layout_adaptation import in_full_precision, may_reduce, run_on_cut_values
from .layout_records import NOT_DIVISIBLE, LayoutError, LayoutRecords
from .node_values import (
    UnknownObject,
    as_meta,
    has_gradient,
    holds_tensors,
    parameters_of,
    returns_float_tensors,
    returns_several_tensors,
)
from .size_arguments import leaves, record_divided_arguments, record_sizes_to_divide
from .split_specs import VIEWS, LayerSplit, ParameterSplit

_CALLED_BOTH_WAYS = "the layer is called with a sharded input and with a whole one"
_GRADIENT_PROPERTIES = ("is_grad_enabled", "requires_grad", "is_leaf")


class Layouts(LayoutRecords):
    """Dry run of a graph; arguments and attributes are those of ``LayoutRecords``."""

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
        if n in self.sharded_fills:
            return self._sharded_fill(n, args, kwargs)
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

    def _reason_against(self, n: fx.Node) -> str:
        value, given = n.meta.get("val"), n.all_input_nodes[0].meta.get("val")
        if function_name(n) in VIEWS and isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor):
            number, size = value.shape[-2:] if value.dim() > 1 else (0, 0)
            if value.dim() == given.dim() + 1 and number * size == given.shape[-1] and number % self.mesh.size():
                return f"{number} heads, or whatever has size {size} here, are {NOT_DIVISIBLE} {self.mesh.size()} ranks"
        return "the operation needs all of a value that is sharded"

    def _branch_node(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Run a node of a branch on whole values; the node that joins the branches returns a shard."""
        if any(True for _ in _sharded_leaves((args, kwargs))):
            given = (self.sources.get(other, frozenset()) for other in n.all_input_nodes)
            self.sources[n] = frozenset[str]().union(*given)
            raise LayoutError(self, n, "a branch depends on a sharded value")
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

    def _sharded_fill(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Return a tensor that repeats one number, or is still empty, as a shard."""
        known, fill = n.meta["val"], self.sharded_fills[n]
        self.sources[n] = fill.sources
        self.sizes_to_divide[n] = (known.shape[fill.dim],)
        try:
            value = self.shard(as_meta(known), fill.dim)
        except ValueError as err:
            raise LayoutError(self, n, str(err)) from err
        local = pytree.tree_map_only(DTensor, DTensor.to_local, (args, kwargs))
        record_divided_arguments(self, n, local, value.to_local().shape)
        return self._record_value(n, value)

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


def _sharded_leaves(value: Any) -> Iterator[Any]:
    return (part for part in pytree.tree_leaves(value) if isinstance(part, (DTensor, FusedOutput)))
