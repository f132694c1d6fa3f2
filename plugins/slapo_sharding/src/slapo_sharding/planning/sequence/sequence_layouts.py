"""Dry run with the sequence split: values between the layers are sharded along it, and boundaries gather and scatter.

Beside sharded and replicated values, there is a third type: a whole value with a partial gradient. It comes out of a gather
whose backward is a reduce-scatter. All values computed from it, and all whole values that meet it, have partial gradients too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from slapo_tracing.nodes import function_name

from ...syncs.sync_hooks import map_first_input
from ..dry_run.layout_records import LayoutError
from ..dry_run.layouts import Layouts
from ..dry_run.node_values import has_gradient, parameters_of
from .module_boundaries import Boundary, BoundaryCollective, SequencePlan, boundary

_SIZE_ARGUMENTS = ("view", "reshape", "expand", "unflatten")
_MERGES = ("view", "reshape", "flatten", "squeeze")

SEQUENCE = "the sequence"
"""Source of a value that is sharded along dimension 1, the sequence."""


class PartialGradientError(LayoutError):
    """Error of a partial gradient that has to be whole. ``places`` are the gathers that the value comes from."""

    def __init__(self, layouts: Layouts, node: fx.Node, places: frozenset[Boundary]) -> None:
        super().__init__(layouts, node, "each rank has a partial gradient")
        self.places = places


class BoundaryError(LayoutError):
    """Error of a value that cannot be gathered or scattered at ``place``."""

    def __init__(self, layouts: Layouts, node: fx.Node, place: Boundary, reason: str) -> None:
        super().__init__(layouts, node, reason)
        self.place = place


class MixedUseError(LayoutError):
    """Error of a parameter that is used on a shard of the sequence and on all of it."""


class LengthError(LayoutError):
    """Error of a ``module`` that applies the whole length to the output of a layer that gathers its own input."""

    def __init__(self, layouts: Layouts, node: fx.Node, module: str) -> None:
        super().__init__(layouts, node, "it has the length of the whole sequence as an argument")
        self.module = module


class SequenceLayouts(Layouts):
    """Dry run of a graph that was traced inside ``mark_boundaries``.

    Args:
        layouts: Earlier dry run, with the splits of layers.
        plan: Plan of the split sequence.

    Attributes:
        gathered: Whole values, to the gathers that they come from.
        partial_gradients: Those of them with a partial gradient.
        flattened: Split values whose sequence is merged with the batch, even a batch of one example.
        reordered: Values with tokens in another order than in the model, because they were gathered when flattened.
        gathering_layers: Results of layers that gather their own input, to the module that calls the layer.
        random_modules: Modules that draw random numbers, to whether they do so for sharded values.
        input_gradient_reduced: Column-parallel layers, to whether a gather's backward reduces the gradient of their input.
        scatter_axes: Row-parallel layers whose output is split along the sequence, to the axis.
    """

    def __init__(self, layouts: Layouts, plan: SequencePlan) -> None:
        given = (layouts.traced, layouts.mesh, layouts.candidates, layouts.sharded_fills, layouts.is_layer)
        left, adapted = layouts.replicated_modules, layouts.adapted_nodes
        super().__init__(*given, left, adapted_nodes=adapted, opaque=layouts.opaque, cuts_only=layouts.cuts_only)
        self.plan, self.sequence_collectives = plan, plan.collectives
        self.gathered: dict[fx.Node, frozenset[Boundary]] = {}
        self.flattened: set[fx.Node] = set()
        self.reordered: set[fx.Node] = set()
        self.gathering_layers: dict[fx.Node, str] = {}
        self.random_modules: dict[Any, bool] = {}

    def check(self) -> None:
        """Run the graph, then check that no parameter is used on a shard of the sequence and on all of it."""
        super().check()
        named = dict(self.traced.named_parameters(remove_duplicate=False))
        partial = {id(named[name]): node for name, node in self.partial_parameters.items()}
        for node in self.graph.nodes:
            for name in self._parameters_used_whole(node):
                if node_of := partial.get(id(named[name])):
                    raise MixedUseError(self, node_of, f"{name!r} is used on a shard of the sequence and on all of it")

    def _parameters_used_whole(self, node: fx.Node) -> list[str]:
        recorded = (self.local_shapes, self.partial_gradients, self.replicated_parts)
        if str(node.target) in self.splits or any(node in each for each in recorded):
            return []
        if node.op == "call_module" and not any(other in self.local_shapes for other in node.all_input_nodes):
            return self.parameter_names(str(node.target))
        if node.op != "output" and parameters_of(node):
            return []
        return [name for other in node.all_input_nodes if has_gradient(other) for name in parameters_of(other)]

    def run_node(self, n: fx.Node) -> Any:
        value = self._pass_boundary(n) if n.target is boundary else super().run_node(n)
        if self.is_split(n):
            self._check_split(n, value)
        draws, is_sharded = n.op == "call_module" and n.meta.get("draws"), n in self.local_shapes
        if draws and self.random_modules.setdefault(n.target, is_sharded) != is_sharded:
            raise LayoutError(self, n, "it draws random numbers for a sharded value and for a whole one")
        self._track_gathered(n, value)
        place = (str(n.args[1]), str(n.args[2])) if n.target is boundary else (str(n.target), "fwd_post")
        collective = self.plan.collectives.get(place) if n.op.startswith("call") else None
        return value if collective is None else self._apply_collective(n, place, collective, value)

    def _check_split(self, n: fx.Node, value: Any) -> None:
        """Refuse values that DTensor's rules allow but that differ in a rank's model: a whole length, or a merged sequence."""
        inside = self.plan.block_around(str(n.meta.get("module"))) is not None
        if n in self.sizes_to_divide and not (self.plan.flattens and inside):
            raise LayoutError(self, n, "it has the length of the whole sequence as an argument")
        if isinstance(value, DTensor) and self._is_flattened(n, value):
            self.flattened.add(n)
            if not self.plan.flattens or value.dim() != 2:
                raise LayoutError(self, n, "the sequence is merged with another dimension")

    def _is_flattened(self, n: fx.Node, value: DTensor) -> bool:
        (placement,) = value.placements
        if type(placement) is not Shard:
            return True
        if function_name(n) in _MERGES and placement.dim < getattr(self.env[n.all_input_nodes[0]].placements[0], "dim", 0):
            return True
        return placement.dim == 0 and any(other in self.flattened for other in n.all_input_nodes)

    def is_split(self, n: fx.Node) -> bool:
        """Return whether a value is sharded along the sequence."""
        return SEQUENCE in self.sources.get(n, ())

    def _pass_boundary(self, n: fx.Node) -> Any:
        (x,) = n.all_input_nodes
        for table in (self.sources, self.local_shapes):
            if x in table:
                table[n] = table[x]  # type: ignore[assignment]
        return self.env[x]

    def _apply_collective(self, n: fx.Node, place: Boundary, collective: BoundaryCollective, value: Any) -> torch.Tensor:
        if collective.op == "all_gather":
            if not self.is_split(n) or not isinstance(value, DTensor) or n in self.flattened:
                raise BoundaryError(self, n, place, "a value to gather is whole")
            del self.sources[n], self.local_shapes[n]
            self.gathered[n] = frozenset((place,))
            if collective.backward == "reduce_scatter":
                self.partial_gradients[n] = self.gathered[n]
            return torch.empty(value.shape, dtype=value.dtype)
        if n in self.sources or not isinstance(value, torch.Tensor) or value.dim() != 3:
            raise BoundaryError(self, n, place, "a value to scatter is split already")
        if n in self.partial_gradients:
            raise PartialGradientError(self, n, self.partial_gradients[n])
        self.gathered.pop(n, None)
        self.sources[n] = frozenset((SEQUENCE,))
        self.local_shapes[n] = (value.shape[0], value.shape[1] // self.mesh.size(), value.shape[2])
        return self.shard(value, 1).contiguous()

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        place = (str(n.target), "fwd_pre")
        if n.op != "call_module" or place not in self.plan.collectives:
            return args, kwargs

        def gather(x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, DTensor) or self.plan.collectives[place].op != "all_gather":
                raise BoundaryError(self, n, place, "a value to gather is whole")
            if not self.flattened.isdisjoint(n.all_input_nodes):
                self.reordered.add(n)
            return torch.empty(x.shape, dtype=x.dtype)

        return map_first_input(gather, args, kwargs)

    def _module_node(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        path = str(n.target)
        if self.is_split(n) and isinstance(self.fetch_attr(path), (nn.modules.conv._ConvNd, nn.RNNBase)):
            raise ValueError("it mixes neighbouring tokens")
        value = super()._module_node(n, args, kwargs)
        if n in self.sources or not self.plan.splits_output(n):
            return value
        if (value.dim() == 2) != any(other in self.reordered for other in n.all_input_nodes):
            return value
        self.sources[n] = frozenset((SEQUENCE,))
        self.scatter_axes[path] = value.dim() - 2
        if value.dim() == 3:
            return self.shard(value, 1).contiguous()
        self.flattened.add(n)
        batch, length, width = self.plan.blocks[self.plan.block_of(path) or ""]
        return self.shard(value.view(batch, length, width), 1).contiguous().view(-1, width)

    def _track_gathered(self, n: fx.Node, value: Any) -> None:
        """Record whole values that come from a gather."""
        place = (str(n.target), "fwd_pre")
        collective = self.plan.collectives.get(place) if n.op == "call_module" else None
        own = frozenset[Boundary]() if collective is None else frozenset((place,))
        self._track_order(n)
        self._track_gathering_layer(n, bool(own))
        places = own.union(*(self.gathered.get(other, ()) for other in n.all_input_nodes))
        partly = own if collective is not None and collective.backward == "reduce_scatter" else frozenset[Boundary]()
        parts = partly.union(*(self.partial_gradients.get(other, ()) for other in n.all_input_nodes))
        self._record_column(n, parts)
        if n in self.sources or not places:
            return
        self.gathered[n] = places
        if parts and (has_gradient(n) or not isinstance(value, torch.Tensor)):
            self._record_partial_gradient(n, parts)

    def _record_column(self, n: fx.Node, parts: frozenset[Boundary]) -> None:
        split = self.splits.get(str(n.target)) if n.op == "call_module" else None
        if split is None or split.output != "sharded":
            return
        if self.input_gradient_reduced.setdefault(str(n.target), bool(parts)) != bool(parts):
            raise PartialGradientError(self, n, parts)

    def _track_order(self, n: fx.Node) -> None:
        if not any(other in self.reordered for other in n.all_input_nodes) or self.is_split(n):
            return
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if (module is None or not self.is_layer(module)) and depends_on_token_order(n, module, self.reordered):
            raise LayoutError(self, n, "its tokens are in another order")
        self.reordered.add(n)

    def _track_gathering_layer(self, n: fx.Node, gathers: bool) -> None:
        if n not in self.sources or (n.op == "call_module" and not gathers):
            return
        before = [self.gathering_layers[other] for other in n.all_input_nodes if other in self.gathering_layers]
        callers = [str(n.meta["module"])] if gathers else before
        block = self.plan.block_around(callers[0]) if callers else None
        if block is None or callers[0] != n.meta["module"]:
            return
        self.gathering_layers[n] = callers[0]
        length = self.plan.blocks[block][1]
        if not gathers and function_name(n) in _SIZE_ARGUMENTS and length in pytree.tree_leaves((n.args, n.kwargs)):
            raise LengthError(self, n, callers[0])

    def _record_partial_gradient(self, n: fx.Node, parts: frozenset[Boundary]) -> None:
        if n.op == "output":
            raise PartialGradientError(self, n, parts)
        for other in n.all_input_nodes:
            if other not in self.partial_gradients and other not in self.sources and has_gradient(other):
                names = parameters_of(other)
                if not names:
                    raise PartialGradientError(self, n, parts)
                self._record_partial(n, other, names)
        if n.op == "call_module":
            self._record_partial(n, None, self.parameter_names(str(n.target)))
        self.partial_gradients[n] = parts


_ELEMENTWISE = frozenset(
    "add sub mul div truediv neg pow sqrt rsqrt exp tanh sigmoid erf relu gelu silu leakyrelu leaky_relu elu softplus dropout "
    "clamp identity contiguous to float half bfloat16 type_as".split()
)


def depends_on_token_order(node: fx.Node, module: nn.Module | None, reordered: Collection[fx.Node]) -> bool:
    """Return whether the result for a token may depend on the order of the ``reordered`` tokens in ``[tokens, width]``.

    A local shard of ``[batch, sequence, width]`` that is flattened and then gathered has its tokens in another order than in
    the unmodified model. Elementwise operations are unaffected, and so are linear layers, which are not asked about. A
    reduce-scatter restores the order.
    """
    name = function_name(node)
    if module is not None:
        name = type(module).__name__.lower() if type(module).__module__.startswith("torch.nn.") else ""
    others = [other.meta.get("val") for other in node.all_input_nodes if other not in reordered]
    return name not in _ELEMENTWISE or not all(isinstance(value, torch.Tensor) and value.dim() < 2 for value in others)
