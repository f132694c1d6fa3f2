"""Dry run of a traced graph with DTensors as the types: finds the values that are sharded when some layers are split.

Nothing is computed and nothing is sent. Values live on the meta device; a value that is sharded is a DTensor, any other is
replicated. Torch's own rules say how an operation passes a sharding on; one that would have to move data does not fit.
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
from .divided_sizes import note_divided, note_sizes
from .function_probe import by_trial, check_parts, is_autograd_function
from .fused_outputs import Fused, of_parts
from .layout_adaptation import in_full_precision, may_reduce, with_parts
from .node_values import Unknown, as_meta, by_heads, gives_numbers, gives_tensors, has_gradient, has_tensors, parameters_of
from .parallel_branches import Branches
from .size_arguments import leaves
from .split_specs import ParameterSplit, Split

UNEVEN = "not divisible by"
"""Words in the reason for which a size or number of heads stays whole."""

_BOTH = "the layer is called with a sharded input and with a whole one"
_SPLITTING = ("view", "reshape", "unflatten")
_OF_GRADIENTS = ("is_grad_enabled", "requires_grad", "is_leaf")


class LayoutError(Exception):
    """A node of the graph cannot run on values sharded like this.

    Args:
        layouts: The dry run.
        node: The node; ``sources`` are the layers whose sharded output reaches it.
        reason: Why.
    """

    def __init__(self, layouts: Layouts, node: fx.Node, reason: str) -> None:
        self.layouts, self.node, self.sources = layouts, node, layouts.sources[node]
        where = f" ({source})" if (source := node.meta.get("source")) else ""
        super().__init__(f"{reason} at {node.name}{where}")

    def sharded_sizes(self) -> set[int]:
        """Sizes, on all ranks together, of the dimensions that the node's inputs are sharded along."""
        found = set()
        for other in self.node.all_input_nodes:
            value, local = other.meta.get("val"), self.layouts.local.get(other)
            if isinstance(value, torch.Tensor) and local is not None:
                found |= {size for size, part in zip(value.shape, local, strict=True) if size != part}
        return found


class Layouts(fx.Interpreter):
    """A dry run of a graph.

    Args:
        graph_module: A traced module, every layer that may be split whole, or the module that ``graph`` is a graph of.
        mesh: One dimension: the tensor-parallel group.
        candidates: Path of a layer to how it is split when its input is replicated; the others stay whole then.
        filled: Nodes that make a tensor of one number, to the dimension in which each rank is to make its part only.
        is_layer: Whether a module can be split; with a second argument such that its output is ``"sharded"`` or ``"partial"``.
        left_whole: Modules that are not split, whatever they are given.
        graph: The graph; None for that of the traced module.
        adapted: Nodes at which a whole value is cut, or its gradient summed, where it meets sharded ones.
        gives_parts: Whether results of the graph may be sharded.
        opaque: Paths of modules that cannot be traced; they are given whole values only.
        parameters: Name of each parameter that forwards use themselves and that is split, to how.
        shared: Layers and parameters that are whole, and whose results may meet sharded values.
        cuts_inputs: Whether arguments of the graph that have gradients may be cut as parameters are.
        dealt: Branches of which each rank runs some.
        summed_by_use: Names of whole parameters that are used on whole values as well: each use on sharded ones has a sum of
            its own.
        cuts_only: Adapted nodes cut parameters and constants, and do nothing else: there is nothing to send.

    Attributes:
        splits: How each layer is split; those not in it stay whole.
        local: Node to the shape of its value on one rank, for those that are sharded.
        sources: Node to the layers its sharding comes from.
        partial: Name of each replicated parameter that is used on sharded values, to a node that does so: each rank has a part
            of its gradient.
        mixed: The nodes that use such parameters, each with the value that is made from them, or None, and their names.
        sized: Nodes that would not do the same to a shard with the arguments they have, and the sizes among these to divide.
        divided: Nodes of this kind, to the places of these sizes among the leaves, with what of each all ranks have whole.
        cut: Nodes of which whole values are cut, by their places among the leaves of the arguments, and along which dimension.
        cut_blocks: Those of them that get a part of each of some blocks, to the sizes of these.
        summed_gradients: Nodes that use whole values each on a rank's part, and these values: their gradients are to be summed.
        weights: Nodes that are made from split parameters alone.
        holders: Paths of the modules that hold these parameters.
        dealt: Joints of branches of which each rank runs some, to these.
        branch_of: Nodes of such branches, to these.
        reduced: Nodes whose results are parts of a sum, or of a mean, that is added up at once, to ``"sum"`` or ``"avg"``.
        norms: Norms and variances along the sharded dimension, whose statistics are summed over the ranks.
        called_whole: Paths of modules that are given whole values and are not split then.
        given_parts: Calls of layers that are given sharded values, to the layers that these come from.
        decided_by_values: Nodes the shapes of whose results follow from values.
        once: Nodes whose results are added up, and the places of the whole values that are to count once in the sum.
        expected: Nodes that take parts out of fused outputs, to the leaves of their arguments on one rank.
        copies: Nodes whose values every rank has whole, with a part of their gradient: parts of fused outputs.
    """

    def __init__(
        self,
        graph_module: nn.Module,
        mesh: DeviceMesh,
        candidates: Mapping[str, Split],
        filled: Mapping[fx.Node, int],
        is_layer: Any,
        left_whole: Collection[nn.Module] = (),
        graph: fx.Graph | None = None,
        adapted: Collection[fx.Node] = (),
        gives_parts: bool = False,
        opaque: Collection[str] = (),
        parameters: Mapping[str, ParameterSplit] | None = None,
        shared: Collection[str] = (),
        cuts_inputs: bool = False,
        dealt: Collection[Branches] = (),
        summed_by_use: Collection[str] = (),
        cuts_only: bool = False,
    ) -> None:
        super().__init__(graph_module, graph=graph)
        self.cuts_inputs, self.summed_by_use, self.cuts_only = cuts_inputs, summed_by_use, cuts_only
        self.dealt = {each.joint: each for each in dealt}
        self.branch_of = {node: each for each in dealt for node in each.inside}
        self.adapted, self.gives_parts, self.opaque = adapted, gives_parts, opaque
        self.extra_traceback = False  # errors are read by the search
        self.traced, self.mesh, self.is_layer = graph_module, mesh, is_layer
        self.candidates, self.filled, self.left_whole = candidates, filled, left_whole
        self.splits: dict[str, Split] = {}
        self.local: dict[fx.Node, tuple[int, ...]] = {}
        self.sources: dict[fx.Node, frozenset[str]] = {}
        self.partial: dict[str, fx.Node] = {}
        self.mixed: list[tuple[fx.Node, fx.Node | None, list[str]]] = []
        self.sized: dict[fx.Node, tuple[int, ...]] = {}
        self.divided: dict[fx.Node, dict[int, int]] = {}
        self.cut: dict[fx.Node, dict[int, int]] = {}
        self.cut_blocks: dict[fx.Node, tuple[int, ...]] = {}
        self.summed_gradients: dict[fx.Node, set[fx.Node]] = {}
        self.parameters, self.shared = parameters or {}, shared
        self.holders = {name.rpartition(".")[0] for name, split in self.parameters.items() if split.owner is None}
        self.weights, self.copies = set[fx.Node](), set[fx.Node]()
        self.blocks: dict[fx.Node, tuple[int, ...]] = {}
        self.reduced: dict[fx.Node, str] = {}
        self.norms: set[fx.Node] = set()
        self.once: dict[fx.Node, int] = {}
        self.expected: dict[fx.Node, list[Any]] = {}
        self.called_whole: set[str] = set()
        self.given_parts: dict[fx.Node, frozenset[str]] = {}
        self.decided_by_values: list[fx.Node] = []
        # what a dry run with the sequence split fills in
        self.parts: dict[fx.Node, Any] = {}
        self.crossings: Mapping[tuple[str, str], Any] = {}
        self.summed: dict[str, bool] = {}
        self.scattered: dict[str, int] = {}

    def check(self) -> None:
        """Run.

        Raises:
            LayoutError: an operation does not fit, or a sharded value is a result of the whole graph.
        """
        with torch.no_grad(), torch.device("meta"), no_redistribution():
            self.run()

    def run_node(self, n: fx.Node) -> Any:
        if n.target is set_state:
            return None  # no node reads what lies in an object
        if n.target is expect and (n.args[1] in _OF_GRADIENTS or (n.args[1] == "shape" and not self.gives_parts)):
            return None  # of a run with gradients, or of the unmodified model, neither of which runs here
        if n.target is torch.autograd.grad:
            raise TraceError(
                "the forward asks for gradients by torch.autograd.grad, of which it is not known what each rank has a part of; "
                "keep the module that does it whole",
                source=n.meta.get("source"),
                failing_module=n.meta.get("module"),
            )
        args, kwargs = self.fetch_args_kwargs_from_env(n) if n.op not in ("placeholder", "get_attr") else ((), {})
        if n in self.branch_of or n in self.dealt:
            return self._dealt(n, args, kwargs)
        is_sharded = any(True for _ in _sharded((args, kwargs)))
        if not is_sharded and self.copies.isdisjoint(n.all_input_nodes):
            return self._replicated(n, args, kwargs)
        self.sources[n] = frozenset[str]().union(*(self.sources.get(other, frozenset()) for other in n.all_input_nodes))
        try:
            value = self._sharded_node(n, args, kwargs) if is_sharded else self._copied_node(n, args, kwargs)
        except ValueError as err:
            raise LayoutError(self, n, str(err)) from err
        except Exception as err:  # torch's rules raise all kinds of errors for what they cannot do
            raise LayoutError(self, n, self._unfit(n)) from err
        value = self._note(n, self._with_blocks(n, value))
        if isinstance(value, DTensor) and n.op != "call_module":
            note_sizes(self, n, value, args, kwargs)
        return value

    def _with_blocks(self, n: fx.Node, value: Any) -> Any:
        """Note what is made from parameters alone, and take the result of a fused projection for what it is."""
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
        return self._fused(n, Fused(as_meta(n.meta["val"]), blocks, placement.dim))

    def blocks_of(self, n: fx.Node) -> tuple[int, ...]:
        """Return the sizes of the parts of a fused parameter, or of what is made from it, that a node is given."""
        return next((self.blocks[other] for other in n.all_input_nodes if other in self.blocks), ())

    def _unfit(self, n: fx.Node) -> str:
        value, given = n.meta.get("val"), n.all_input_nodes[0].meta.get("val")
        if function_name(n) in _SPLITTING and isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor):
            number, size = value.shape[-2:] if value.dim() > 1 else (0, 0)
            if value.dim() == given.dim() + 1 and number * size == given.shape[-1] and number % self.mesh.size():
                return f"{number} heads, or whatever has size {size} here, are {UNEVEN} {self.mesh.size()} ranks"
        return "the operation needs all of a value that is sharded"

    def _dealt(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Run a node of a branch on whole values; what joins the branches has a part of them on each rank."""
        if any(True for _ in _sharded((args, kwargs))):
            given = (self.sources.get(other, frozenset()) for other in n.all_input_nodes)
            self.sources[n] = frozenset[str]().union(*given)
            raise LayoutError(self, n, "a branch is given a sharded value")
        if n in self.dealt:
            branches = self.dealt[n]
            self.sources[n] = frozenset(branches.splits(self.mesh.size()))
            return self._note(n, self._shard(as_meta(n.meta["val"]), branches.dim))
        branches = self.branch_of[n]
        if n in branches.entries or gives_numbers(n):
            self._note_uses(n, branches.given(n))
        if n in branches.shared:
            self._note_partial(n, None, branches.shared[n])
        return self._replicated(n, args, kwargs)

    def _replicated(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        is_layer = n.op == "call_module" and n not in self.branch_of
        split = self.candidates.get(str(n.target)) if is_layer else None
        if is_layer and split is None:
            self._note_whole_call(n, str(n.target))
        if split is not None:
            self.sources[n] = frozenset((str(n.target),))
            self._found(str(n.target), split)
            whole = as_meta(n.meta["val"])
            dim = channel_dim(self.fetch_attr(str(n.target))) % whole.dim()
            try:
                if split.blocks:
                    return self._fused(n, Fused(whole, split.blocks, dim, split.copied))
                return self._note(n, self._shard(whole, dim))
            except ValueError as err:
                raise LayoutError(self, n, str(err)) from err
        given = self.parameters.get(str(n.target)) if n.op == "get_attr" else None
        if given is not None and given.owner is None:
            return self._parameter(n, given)
        if isinstance(known := n.meta.get("val"), torch.Tensor):
            if n in self.filled:
                self.sources[n] = frozenset()
                self.sized[n] = (known.shape[self.filled[n]],)
                value = self._shard(as_meta(known), self.filled[n])
                note_divided(self, n, (args, kwargs), value.to_local().shape)
                return self._note(n, value)
            return as_meta(known)
        if n.op == "placeholder":
            return n.meta.get("val")
        if n.target in (getattr, operator.getitem) and args[0] is None:  # of an object that the forward is given
            return Unknown()
        if n.op == "call_module" and str(n.target) in self.opaque:
            return Unknown()
        try:
            value = self._whole(n, args, kwargs) if n.op == "call_module" else getattr(self, n.op)(n.target, args, kwargs)
        except NotImplementedError:
            self.decided_by_values.append(n)
            return Unknown()
        return pytree.tree_map_only(torch.Tensor, as_meta, value)

    def _parameter(self, n: fx.Node, split: ParameterSplit) -> DTensor:
        self.sources[n] = frozenset((str(n.target),))
        self.weights.add(n)
        if split.blocks:
            self.blocks[n] = split.blocks
        try:
            if any(block % self.mesh.size() for block in split.blocks):
                raise ValueError(f"blocks {split.blocks} are {UNEVEN} {self.mesh.size()} ranks")
            value: DTensor = self._note(n, self._shard(as_meta(n.meta["val"]), split.dim))
        except ValueError as err:
            raise LayoutError(self, n, str(err)) from err
        return value

    def _fused(self, n: fx.Node, fused: Fused) -> Fused:
        self.local[n] = tuple(fused.local(self.mesh.size()).shape)
        return fused

    def _taken(self, n: fx.Node, value: Any) -> Any:
        """Return one of the parts of a value: sharded, whole on every rank, or of parts itself."""
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and has_gradient(n):
            self.copies.add(n)
        return self._fused(n, value) if isinstance(value, Fused) else value

    def _copied_node(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Run a node on values that every rank has whole, with a part of their gradient."""
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if n.op == "output" or (module is not None and (str(n.target) in self.opaque or self.is_layer(module))):
            raise ValueError("a part of a fused output that every rank has whole is used for all heads together")
        if module is not None:
            self._note_partial(n, None, [f"{n.target}.{name}" for name, _ in module.named_parameters()])
        self._note_mixed(n)
        value, given = self._replicated(n, args, kwargs), self.sources.pop(n)
        if has_gradient(n) or gives_tensors(n):
            self.copies.add(n)
            self.sources[n] = given
        return value

    def _sharded_node(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        args, kwargs = in_full_precision((args, kwargs))
        if n.op == "output" and self.gives_parts:
            return args[0]
        if n.op == "output":
            raise ValueError("a sharded value is a result of the model")
        if n.target is operator.getitem and isinstance(args[0], list):
            return self._taken(n, args[0][args[1]])
        fused = next((value for value in _sharded((args, kwargs)) if isinstance(value, Fused)), None)
        if fused is not None:
            return self._taken(n, of_parts(self, n, fused, args, kwargs))
        if n.meta.get("mutates") and not isinstance(args[0], DTensor):
            raise ValueError("a replicated value is changed with a sharded one")
        if n in self.adapted and (n.op != "call_module" or norm_of(self.fetch_attr(str(n.target))) is not None):
            value = self._adapted_node(n, args, kwargs)
            if n.op != "call_module" or n in self.norms:
                self._note_mixed(n)
                return value
        self._note_mixed(n)
        if n.op == "call_module":
            return self._module(n, args, kwargs)
        return self._call(n, args, kwargs)

    def _call(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        if n.target is torch.cat:  # an empty tensor fits every layout
            args = ([value for value in args[0] if value.numel()], *args[1:])
        try:
            value = getattr(self, n.op)(n.target, args, kwargs)
            if is_autograd_function(n.target):
                check_parts(n.target, args, kwargs, value, self.mesh.size())
            return value
        except NotImplementedError:
            return by_trial(n, args, kwargs, self.mesh)
        except RuntimeError:
            return by_heads(function_name(n), args, kwargs)

    def _adapted_node(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        try:
            return self._call(n, args, kwargs) if n.op != "call_module" else self._whole(n, args, kwargs)
        except RuntimeError:
            return with_parts(self, n, args, kwargs)

    def _module(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        path = str(n.target)
        module = self.fetch_attr(path)
        by_channel = counts_channels_only(module) and isinstance(args[0], DTensor) and has_batch(module, args[0].dim())
        if by_channel and args[0].placements == (Shard(1),):
            return self._shard(as_meta(n.meta["val"]), 1)
        if path in self.opaque:
            raise ValueError(f"{path!r}, which cannot be traced, needs all of a value that is sharded")
        if not self.is_layer(module):
            names = [f"{path}.{name}" for name, _ in module.named_parameters()]
            if any(name in self.summed_by_use for name in names):
                raise ValueError(
                    f"the parameters of {path!r} are used on whole values as well, and their gradient is summed once"
                )
            self._note_partial(n, None, names)
            return self._whole(n, args, kwargs)
        keeps = self.is_layer(module, "kept") and has_tensors(module)
        if not keeps and not self.is_layer(module, "partial"):
            raise ValueError(f"the layer {path!r}, which cannot be split along its input, needs all of a value that is sharded")
        x = args[0] if args else next(iter(kwargs.values()))
        dim = channel_dim(module) % x.dim()
        if x.placements != (Shard(dim),) or module in self.left_whole:
            along = ", ".join(str(getattr(placement, "dim", placement)) for placement in x.placements)
            given = f"the layer {path!r} is given a value of shape {list(x.shape)} that is split along dimension {along}"
            raise ValueError(f"{given} and not, as it would have to be, whole or split along its last one,")
        self.given_parts[n] = self.sources[n]
        if keeps:
            self._found(path, Split("kept"))
            return self._shard(as_meta(n.meta["val"]), dim)
        self._found(path, Split("reduced"))
        self.sources.pop(n)
        return as_meta(n.meta["val"])

    def _whole(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Call a module with all of its parameters, without their data."""
        module = self.fetch_attr(str(n.target))
        state = {name: as_meta(value) for name, value in [*module.named_parameters(), *module.named_buffers()]}
        return functional_call(module, state, args, kwargs)

    def _note_whole_call(self, n: fx.Node, path: str) -> None:
        self.called_whole.add(path)
        if path in self.splits:
            of = next(other for other in self.graph.find_nodes(op="call_module", target=path) if other in self.given_parts)
            self.sources[n] = self.given_parts[of]
            raise LayoutError(self, n, _BOTH)

    def _found(self, path: str, split: Split) -> None:
        if self.splits.setdefault(path, split) != split or path in self.called_whole:
            raise ValueError(_BOTH)

    def _note_mixed(self, n: fx.Node) -> None:
        """Ranks that use a replicated value each on their own shard have each a part of its gradient."""
        if gives_numbers(n):
            self._note_uses(n, n.all_input_nodes)

    def _note_uses(self, n: fx.Node, given: Iterable[fx.Node]) -> None:
        for other in given:
            if other in self.sources or other in self.parts:
                continue
            if self._is_written(other):
                raise ValueError(f"the whole value {other.name!r}, which is written in place, gets a part of its gradient only")
            if not has_gradient(other) or self._counts_once(n, other):
                continue
            names = parameters_of(other) if n not in self.branch_of else ()
            if names and not any(name.rpartition(".")[0] in self.holders or name in self.summed_by_use for name in names):
                self._note_partial(n, other, names)
            elif (n in self.adapted and not self.cuts_only) or n in self.branch_of:
                self.summed_gradients.setdefault(n, set()).add(other)
            else:
                raise ValueError(f"the whole value {other.name!r} gets a part of its gradient only")

    def _counts_once(self, n: fx.Node, other: fx.Node) -> bool:
        values = leaves((n.args, n.kwargs))
        return n in self.once and [place for place, value in enumerate(values) if value is other] == [self.once[n]]

    def _is_written(self, node: fx.Node) -> bool:
        """Return whether a value has a gradient as something with one was written into it, or into a view of its memory."""
        value = node.meta.get("val")
        is_number = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        return is_number and "memory" in node.meta and node.meta["memory"] in self._written

    @cached_property
    def _written(self) -> set[Any]:
        found = set()
        for node in self.graph.nodes:
            given = node.all_input_nodes
            if any(map(has_gradient, given)):
                found |= {given[place].meta.get("memory") for place in node.meta.get("mutates") or ()}
        return found - {None}

    def _note_partial(self, n: fx.Node, other: fx.Node | None, names: list[str]) -> None:
        self.partial.update(dict.fromkeys(names, n))
        self.mixed.append((n, other, names))

    def _shard(self, whole: torch.Tensor, dim: int) -> DTensor:
        size = self.mesh.size()
        if whole.shape[dim] % size:
            raise ValueError(f"size {whole.shape[dim]} is {UNEVEN} {size} ranks")
        placements: list[Placement] = [Shard(dim)]
        local = torch.empty_like(whole.chunk(size, dim)[0])  # dense, as what a layer gives
        return DTensor.from_local(local, self.mesh, placements, run_check=False)

    def _note(self, n: fx.Node, value: Any) -> Any:
        for part in _sharded(value):
            if isinstance(part, DTensor) and isinstance(placement := part.placements[0], Partial):
                is_sum = type(placement) is Partial and placement.reduce_op in ("sum", "avg")
                if part is value and is_sum and n in self.adapted and not self.cuts_only and may_reduce(self, n):
                    self.sources.pop(n)
                    self.reduced[n] = placement.reduce_op
                    return part.to_local()
                raise LayoutError(self, n, "its result is a partial sum")
        if isinstance(value, DTensor):
            if value.placements[0].is_replicate():
                self.sources.pop(n, None)
                return value.to_local()
            self.local[n] = tuple(value.to_local().shape)
        elif isinstance(value, torch.Tensor) and n not in self.copies:
            self.sources.pop(n, None)  # it is given a sharded value for another fact
        return value

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return as_meta(value) if isinstance(value, torch.Tensor) else value


def _sharded(value: Any) -> Iterator[Any]:
    return (part for part in pytree.tree_leaves(value) if isinstance(part, (DTensor, Fused)))
