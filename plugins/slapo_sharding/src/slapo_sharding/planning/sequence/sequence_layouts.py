"""The dry run with the sequence split as well: values between the layers are sharded along it, borders gather and scatter.

Beside sharded and replicated there is a third type here: a whole value of whose gradient each rank has a *part*. It comes out
of a gather whose backward is a reduce-scatter; whatever it meets, and what ranks make of it, has to leave it so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from slapo_tracing.nodes import function_name

from ...syncs.sync_hooks import map_first_input
from ..dry_run.layouts import LayoutError, Layouts
from ..dry_run.node_values import has_gradient, parameters_of
from .module_boundaries import Place, border
from .sequence_plan import Crossing, Plan
from .token_order import minds_order

_GIVEN_SIZES = ("view", "reshape", "expand", "unflatten")
_MERGES = ("view", "reshape", "flatten", "squeeze")

SEQUENCE = "the sequence"
"""Among the sources of a value: it is sharded along dimension 1."""


class PartError(LayoutError):
    """Ranks have a part each of a gradient that has to be whole; ``places`` are the gathers it goes back to."""

    def __init__(self, layouts: Layouts, node: fx.Node, places: frozenset[Place]) -> None:
        super().__init__(layouts, node, "ranks have a part of a gradient each")
        self.places = places


class BorderError(LayoutError):
    """A value cannot be gathered or scattered at ``place``."""

    def __init__(self, layouts: Layouts, node: fx.Node, place: Place, reason: str) -> None:
        super().__init__(layouts, node, reason)
        self.place = place


class MixedUse(LayoutError):
    """A parameter is used on a part of the sequence and on all of it."""


class LengthError(LayoutError):
    """Error of a ``module`` that gives the whole length to values of a layer that gathers, and has seen a part of it only."""

    def __init__(self, layouts: Layouts, node: fx.Node, module: str) -> None:
        super().__init__(layouts, node, "it is given the length of the whole sequence")
        self.module = module


class SequenceLayouts(Layouts):
    """A dry run of a graph that was traced inside ``marked``.

    Args:
        layouts: An earlier dry run, which says how layers are split.
        plan: Where the sequence is split.

    Attributes:
        gathered: Whole values, to the gathers they come from.
        parts: Those of them with a part of their gradient on each rank.
        flattened: Split values whose sequence is merged with the batch, be that of one example only.
        reordered: Values with the tokens in another order than the model's: gathered when flattened.
        alone: Results of layers that gather for themselves, to the module that calls the layer.
        forked: Modules that draw random numbers, to whether they do for sharded values.
        summed: Column-parallel layers, to whether the gradient of their input is summed by such a gather.
        scattered: Row-parallel layers whose result is split along the sequence, to the axis.
    """

    def __init__(self, layouts: Layouts, plan: Plan) -> None:
        given = (layouts.traced, layouts.mesh, layouts.candidates, layouts.filled, layouts.is_layer, layouts.left_whole)
        super().__init__(*given, adapted=layouts.adapted, opaque=layouts.opaque, cuts_only=layouts.cuts_only)
        self.plan, self.crossings = plan, plan.crossings
        self.gathered: dict[fx.Node, frozenset[Place]] = {}
        self.flattened: set[fx.Node] = set()
        self.reordered: set[fx.Node] = set()
        self.alone: dict[fx.Node, str] = {}
        self.forked: dict[Any, bool] = {}

    def check(self) -> None:
        """Run, then see that each parameter is used on parts of values or on whole ones."""
        super().check()
        named = dict(self.traced.named_parameters(remove_duplicate=False))
        partial = {id(named[name]): node for name, node in self.partial.items()}
        for node in self.graph.nodes:
            for name in self._used_whole(node):
                if node_of := partial.get(id(named[name])):
                    raise MixedUse(self, node_of, f"{name!r} is used on a part of the sequence and on all of it")

    def _used_whole(self, node: fx.Node) -> list[str]:
        if node in self.local or node in self.parts or node in self.copies or str(node.target) in self.splits:
            return []
        if node.op == "call_module" and not any(other in self.local for other in node.all_input_nodes):
            module = self.traced.get_submodule(str(node.target))
            return [f"{node.target}.{name}" for name, _ in module.named_parameters()]
        if node.op != "output" and parameters_of(node):
            return []
        return [name for other in node.all_input_nodes if has_gradient(other) for name in parameters_of(other)]

    def run_node(self, n: fx.Node) -> Any:
        if n.target is border:
            value = self._pass(n)
        else:
            value = super().run_node(n)
        if self.is_split(n):
            self._check_split(n, value)
        if (
            n.op == "call_module"
            and n.meta.get("draws")
            and self.forked.setdefault(n.target, n in self.local) != (n in self.local)
        ):
            raise LayoutError(self, self._failed(n), "it draws random numbers for a part of a value and for a whole one")
        self._follow(n, value)
        place = (str(n.args[1]), str(n.args[2])) if n.target is border else (str(n.target), "fwd_post")
        crossing = self.plan.crossings.get(place) if n.op.startswith("call") else None
        return value if crossing is None else self._cross(n, place, crossing, value)

    def _check_split(self, n: fx.Node, value: Any) -> None:
        """Refuse what a part of the sequence may be, for torch's rules, but not in a rank's model."""
        inside = self.plan.block_around(str(n.meta.get("module"))) is not None
        if n in self.sized and not (self.plan.flattens and inside):
            raise LayoutError(self, n, "it is given the length of the whole sequence")
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

    def _pass(self, n: fx.Node) -> Any:
        (x,) = n.all_input_nodes
        for table in (self.sources, self.local):
            if x in table:
                table[n] = table[x]  # type: ignore[assignment]
        return self.env[x]

    def _cross(self, n: fx.Node, place: Place, crossing: Crossing, value: Any) -> torch.Tensor:
        if crossing.op == "all_gather":
            if not self.is_split(n) or not isinstance(value, DTensor) or n in self.flattened:
                raise BorderError(self, self._failed(n), place, "a value that is gathered is whole")
            del self.sources[n], self.local[n]
            self.gathered[n] = frozenset((place,))
            if crossing.backward == "reduce_scatter":
                self.parts[n] = self.gathered[n]
            return torch.empty(value.shape, dtype=value.dtype)
        if n in self.sources or not isinstance(value, torch.Tensor) or value.dim() != 3:
            raise BorderError(self, self._failed(n), place, "a value that is scattered is split already")
        if n in self.parts:
            raise PartError(self, self._failed(n), self.parts[n])
        self.gathered.pop(n, None)
        self.sources[n] = frozenset((SEQUENCE,))
        self.local[n] = (value.shape[0], value.shape[1] // self.mesh.size(), value.shape[2])
        return self._shard(value, 1).contiguous()

    def _failed(self, n: fx.Node) -> fx.Node:
        self.sources.setdefault(n, frozenset())
        return n

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        place = (str(n.target), "fwd_pre")
        if n.op != "call_module" or place not in self.plan.crossings:
            return args, kwargs

        def gather(x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, DTensor) or self.plan.crossings[place].op != "all_gather":
                raise BorderError(self, self._failed(n), place, "a value that is gathered is whole")
            if not self.flattened.isdisjoint(n.all_input_nodes):
                self.reordered.add(n)
            return torch.empty(x.shape, dtype=x.dtype)

        return map_first_input(gather, args, kwargs)

    def _module(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        path = str(n.target)
        if self.is_split(n) and isinstance(self.fetch_attr(path), (nn.modules.conv._ConvNd, nn.RNNBase)):
            raise ValueError("it mixes neighbours along the sequence")
        value = super()._module(n, args, kwargs)
        if n in self.sources or not self.plan.splits_output(n):
            return value
        if (value.dim() == 2) != any(other in self.reordered for other in n.all_input_nodes):
            return value
        self.sources[n] = frozenset((SEQUENCE,))
        self.scattered[path] = value.dim() - 2
        if value.dim() == 3:
            return self._shard(value, 1).contiguous()
        self.flattened.add(n)
        batch, length, width = self.plan.blocks[self.plan.block_of(path) or ""]
        return self._shard(value.view(batch, length, width), 1).contiguous().view(-1, width)

    def _follow(self, n: fx.Node, value: Any) -> None:
        """Keep track of whole values that come from a gather."""
        place = (str(n.target), "fwd_pre")
        crossing = self.plan.crossings.get(place) if n.op == "call_module" else None
        own = frozenset[Place]() if crossing is None else frozenset((place,))
        self._follow_order(n)
        self._follow_alone(n, bool(own))
        places = own.union(*(self.gathered.get(other, ()) for other in n.all_input_nodes))
        partly = own if crossing is not None and crossing.backward == "reduce_scatter" else frozenset[Place]()
        parts = partly.union(*(self.parts.get(other, ()) for other in n.all_input_nodes))
        self._note_column(n, parts)
        if n in self.sources or not places:
            return
        self.gathered[n] = places
        if parts and (has_gradient(n) or not isinstance(value, torch.Tensor)):
            self._part_of_gradient(n, parts)

    def _note_column(self, n: fx.Node, parts: frozenset[Place]) -> None:
        split = self.splits.get(str(n.target)) if n.op == "call_module" else None
        if split is None or split.output != "sharded":
            return
        if self.summed.setdefault(str(n.target), bool(parts)) != bool(parts):
            raise PartError(self, n, parts)

    def _follow_order(self, n: fx.Node) -> None:
        if not any(other in self.reordered for other in n.all_input_nodes) or self.is_split(n):
            return
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if (module is None or not self.is_layer(module)) and minds_order(n, module, self.reordered):
            raise LayoutError(self, self._failed(n), "it is given tokens in another order")
        self.reordered.add(n)

    def _follow_alone(self, n: fx.Node, gathers: bool) -> None:
        if n not in self.sources or (n.op == "call_module" and not gathers):
            return
        callers = (
            [str(n.meta["module"])] if gathers else [self.alone[other] for other in n.all_input_nodes if other in self.alone]
        )
        block = self.plan.block_around(callers[0]) if callers else None
        if block is None or callers[0] != n.meta["module"]:
            return
        self.alone[n] = callers[0]
        length = self.plan.blocks[block][1]
        if not gathers and function_name(n) in _GIVEN_SIZES and length in pytree.tree_leaves((n.args, n.kwargs)):
            raise LengthError(self, n, callers[0])

    def _part_of_gradient(self, n: fx.Node, parts: frozenset[Place]) -> None:
        if n.op == "output":
            raise PartError(self, self._failed(n), parts)
        for other in n.all_input_nodes:
            if other not in self.parts and other not in self.sources and has_gradient(other):
                names = parameters_of(other)
                if not names:
                    raise PartError(self, self._failed(n), parts)
                self._note_partial(n, other, names)
        if n.op == "call_module":
            self._note_partial(n, None, [f"{n.target}.{name}" for name, _ in self.fetch_attr(str(n.target)).named_parameters()])
        self.parts[n] = parts
