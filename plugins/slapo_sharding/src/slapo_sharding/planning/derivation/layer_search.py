"""Search for a tensor-parallel plan in the traced graph of a model: the layers that can be split together.

Every layer is first split along its output. Where a sharded value does not fit an operation, its source layers are tried as
fused layers (q, k and v in one), and else stay whole. What remains are groups of column-parallel layers. Their output stays
sharded, through activations or attention, until row-parallel layers reduce it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from slapo_tracing.nodes import function_name, is_opaque

from ...rules.channels import channel_dim
from ...splitting.module_paths import ancestors, without_block_numbers
from ...syncs.sharded_norms import norm_of
from ..dry_run.layout_adaptation import may_cut, may_reduce, needs_statistics
from ..dry_run.layout_records import LayoutError, LayoutRecords
from ..dry_run.layouts import Layouts
from ..dry_run.node_values import calls_by_path
from ..dry_run.parallel_branches import Branches
from ..dry_run.sharded_fills import ShardedFill, fills_to_shard, upstream_of
from ..dry_run.split_specs import LayerSplit, ParameterSplit, fused_sizes, next_split
from ..local_sizes.adapted_modules import is_inside
from .direct_parameters import cut_parameters, direct_parameters, fused_splits, mixed_parameters
from .residual_streams import residual_streams

Adapts = Literal["", "parameters", "all"]


@dataclass
class DerivedPlan:
    """Derived plan.

    Args:
        layouts: Dry run that verified the plan.
        reasons: Reason for each layer that stays whole, by path.
        replicated_key_heads: Attention modules with key heads that several ranks hold.
    """

    layouts: Layouts
    reasons: dict[str, str] = field(default_factory=dict)
    replicated_key_heads: list[nn.Module] = field(default_factory=list)

    @property
    def splits(self) -> dict[str, LayerSplit]:
        """Return the split of each layer, by path."""
        return self.layouts.splits

    @property
    def parameters(self) -> Mapping[str, ParameterSplit]:
        """Return the split of each parameter that a forward uses directly, by name."""
        return self.layouts.parameters

    def splits_parameter(self, name: str) -> bool:
        """Return whether a parameter, or the layer that holds it, is split."""
        return name in self.parameters or any(path in self.splits for path in ancestors(name))

    def __len__(self) -> int:
        return len(self.splits) + len(self.parameters)


@dataclass
class LayerSearch:
    """Search for the plan that splits as many layers as possible.

    Args:
        traced: Flat graph of the model in which no layer and no table is inlined.
        mesh: Tensor-parallel group as a mesh of one dimension.
        is_layer: Returns whether a module is a layer that can be split, or with a second argument whether its output can be
            ``"sharded"`` or ``"partial"``.
        is_table: Returns whether a module is an embedding that can be split along its output. A table is split where that
            helps: one of position biases has one column per head.
        replicated_modules: Modules that are never split.
        opaque: Paths of modules that cannot be traced.
        whole_parameters: Names of parameters that are not split, and paths of modules whose parameters are not split.
        adapts: Whole values that may be cut where they meet sharded ones: parameters and constants, or all, with reduced
            gradients.
        unadapted: Paths, without block numbers, of modules whose forwards cut no whole values.
        branches: Branches that ranks run some each, if their results fit.
    """

    traced: fx.GraphModule
    mesh: DeviceMesh
    is_layer: Callable[..., bool]
    is_table: Callable[[nn.Module], bool]
    replicated_modules: Collection[nn.Module]
    opaque: Collection[str]
    whole_parameters: Collection[str]
    adapts: Adapts = ""
    unadapted: Collection[str] = ()
    branches: Collection[Branches] = ()

    def __post_init__(self) -> None:
        own = {name for each in self.branches for names in each.parameters for name in names}
        self.options: dict[str, list[ParameterSplit]] = {}  # remaining splits to try for each parameter
        if self.adapts == "all":
            self.options = direct_parameters(self.traced, {*self.whole_parameters, *own})
        self.calls = calls_by_path(self.traced.graph)
        named = {path: self.traced.get_submodule(path) for path in self.calls}
        named = {path: module for path, module in named.items() if module not in self.replicated_modules}
        self.candidates = {path: LayerSplit("sharded") for path, module in named.items() if self.is_layer(module, "sharded")}
        self.reasons: dict[str, str] = {}
        for path in residual_streams(self.traced, self.is_layer, self.candidates):
            del self.candidates[path]
            self.reasons[path] = "it adds to the residual stream between blocks"
        self.tables = {path for path, module in named.items() if self.is_table(module)}
        self.shared: set[str] = set()
        self.reduced_per_use: set[str] = set()
        self.all_tables = frozenset(self.tables)
        self.sharded_fills: dict[fx.Node, ShardedFill] = {}
        self.tried: set[fx.Node] = set()
        self.adapted_nodes: set[fx.Node] = set()
        # layers at fault, to those left whole instead
        self.left_whole_instead: dict[frozenset[str], dict[str, LayerSplit]] = {}
        self.unfused_reasons: dict[str, str] = {}

    def run(self) -> DerivedPlan:
        """Return the plan."""
        while True:
            parameters = {name: splits[0] for name, splits in self.options.items()}
            for each in self.branches:
                parameters |= each.splits(self.mesh.size())
            kept = {*self.candidates, *parameters}
            self.sharded_fills = {node: fill for node, fill in self.sharded_fills.items() if fill.sources <= kept}
            layouts = Layouts(
                *(self.traced, self.mesh, self.candidates, self.sharded_fills, self.is_layer, self.replicated_modules),
                adapted_nodes=self.adapted_nodes,
                opaque=self.opaque,
                parameters=parameters,
                shared=self.shared,
                branches=self.branches,
                reduced_per_use=self.reduced_per_use,
                cuts_only=self.adapts == "parameters",
            )
            try:
                layouts.check()
            except LayoutError as err:
                self.retreat(err)
            else:
                if not (mixed := mixed_parameters(layouts)) <= self.reduced_per_use:
                    self.reduced_per_use |= mixed
                    continue
                more = cut_parameters(layouts, self.traced) if self.options else {}
                if not (more := {name: split for name, split in more.items() if name not in self.reasons}):
                    return DerivedPlan(layouts, self.reasons)
                self.options.update({name: [split] for name, split in more.items()})

    def retreat(self, err: LayoutError) -> None:
        """Change the search after an operation did not fit.

        In this order: drop branches, split a table or a fill too, adapt the operation, try the next split of parameters, leave
        lighter layers whole instead, try the layers at fault as fused layers, or leave them whole. Fused splits and adapted
        operations apply to all repeated blocks.
        """
        if unfit := [each for each in self.branches if err.sources & each.splits(1).keys()]:
            self.branches = [each for each in self.branches if each not in unfit]
            return
        if not err.sources:  # only filled tensors are sharded here
            self.sharded_fills.clear()
            return
        whole = [other for other in err.node.all_input_nodes if other not in err.layouts.sources]
        upstream = upstream_of(whole)
        tables = {str(node.target) for node in upstream if node.op == "call_module"} & self.tables
        if tables and not err.sources & self.tables:
            self.candidates.update(dict.fromkeys(sorted(tables), LayerSplit("sharded")))
            self.tables -= tables
            return
        filled = fills_to_shard(err)
        if filled.keys() - self.tried:
            self.sharded_fills.update(filled)
            self.tried |= filled.keys()
            return
        if self._adapt(err.node, err.layouts):
            return
        given = [other for other in err.node.all_input_nodes if other in err.layouts.sources]
        weights = {name for other in given if other in err.layouts.weights for name in err.layouts.sources[other]}
        if weights and any(other not in err.layouts.weights for other in given):
            self._try_next(weights, str(err))
            return
        if (err.sources not in self.left_whole_instead) and (lighter := self._lighter_layers(err, upstream)):
            places = {_position(path) for path in lighter}
            others = {path: split for path, split in self.candidates.items() if _position(path) in places}
            self.left_whole_instead[err.sources] = others
            for path in others:
                del self.candidates[path]
                self.reasons[path] = str(err)
            return
        if self._adapt(err.node, err.layouts, of_layers=True):
            return
        if lightest := self._lightest_layers(err):
            for path in [path for path in (*self.candidates, *self.options) if _position(path) in lightest]:
                (self.candidates if path in self.candidates else self.options).pop(path)
                self.reasons[path] = f"each rank uses its whole output for a part of the heads: {err}"
                self.shared.add(path)
            return
        self._try_next(err.sources & self.options.keys(), str(err), err.layouts)
        places = {_position(path) for path in err.sources}
        for path in [path for path in self.candidates if _position(path) in places]:
            dim = channel_dim(self.traced.get_submodule(path))
            other = next_split(self.candidates[path], self.calls[path], dim) if self._have_same_parts(err.sources) else None
            if other is not None:
                self.candidates[path] = other
                self.unfused_reasons.setdefault(path, f"{err}; in {len(other.blocks)} parts: ")
            else:
                self.reasons[path] = (self.unfused_reasons[path] if self.candidates.pop(path).blocks else "") + str(err)
                self._split_again(path)

    def _have_same_parts(self, sources: Collection[str]) -> bool:
        """Return whether the model takes the same parts out of the outputs of all these layers, or there is only one layer."""
        calls = {path: self.calls.get(path, []) for path in sources}
        found = {fused_sizes(each, channel_dim(self.traced.get_submodule(path))) for path, each in calls.items() if each}
        return len(sources) == 1 or (all(calls.values()) and len(found) == 1 and () not in found)

    def _split_again(self, path: str) -> None:
        """Split the layers again that were left whole instead of one that is now left whole itself."""
        for sources, others in self.left_whole_instead.items():
            if path in sources:
                self.candidates.update(others)
                for other in others:
                    self.reasons.pop(other, None)
                others.clear()

    def _adapt(self, node: fx.Node, layouts: LayoutRecords, of_layers: bool = False) -> bool:
        """Allow a node, and the nodes of its source line in identical modules, to cut whole values and reduce results."""
        module = without_block_numbers(node.meta.get("module", ""))
        is_allowed = self.adapts and module not in self.unadapted
        if not is_allowed or node in self.adapted_nodes or not _can_adapt(node, layouts, of_layers):
            return False
        if layouts.sources[node] & self.all_tables and needs_statistics(layouts, node):
            return False  # else the whole model would be split along the width of the embedding's output
        alike = (node.meta.get("source"), module)
        for other in self.traced.graph.find_nodes(op=node.op, target=node.target):
            if (other.meta.get("source"), without_block_numbers(other.meta.get("module", ""))) == alike:
                self.adapted_nodes.add(other)
        return True

    def _try_next(self, names: Collection[str], reason: str, layouts: LayoutRecords | None = None) -> None:
        """Use the next split of parameters, in all repeated blocks: as fused ones, along another dimension, or none."""
        for place in {_position(name) for name in names}:
            alike = [name for name in self.options if _position(name) == place]
            (first, *others) = names
            if layouts is not None and not others and (fused := fused_splits(layouts, first)):
                for path in [name.rpartition(".")[0] for name in alike]:
                    for name, split in fused.items():
                        own = f"{path}.{name.rpartition('.')[2]}" if path else name
                        self.options[own] = [split, *self.options.get(own, ())[1:]]
                continue
            for name in alike:
                del self.options[name][0]
                if not self.options[name]:
                    del self.options[name]
                    self.reasons[name] = reason

    def _lighter_layers(self, err: LayoutError, upstream: list[fx.Node]) -> set[str]:
        """Return the layers to leave whole instead of those at fault if they have fewer parameters.

        They are the first of a column- and row-parallel pair whose reduced output met sharded values. With the first whole,
        the second is split as the layer at fault is. So an adapter gives way to the layer beside it. In attention, a first
        layer of equal size gives way too: with it whole, the heads are split.
        """
        splits, sources = err.layouts.splits, err.layouts.sources
        called = [node for node in upstream if node.op == "call_module"]
        seconds = [node for node in called if splits.get(str(node.target)) == LayerSplit("reduced")]
        firsts = {path for node in seconds for other in node.all_input_nodes for path in sources.get(other, ())}
        firsts &= self.candidates.keys() - err.sources
        ours, theirs = self._numel(firsts), self._numel(err.sources)
        return firsts if ours < theirs or (ours == theirs and function_name(err.node) in _ATTENTION) else set()

    def _lightest_layers(self, err: LayoutError) -> set[str]:
        """Return the positions of the lightest layers at fault if heavier ones meet them, such as the key layer of one head.

        Each rank then uses the whole output of these layers on its shard, with a reduced gradient.
        """
        module, tables = without_block_numbers(err.node.meta.get("module", "")), err.sources & self.all_tables
        if self.adapts != "all" or module in self.unadapted:
            return set()
        if tables:  # a table of distances, for one, that queries meet in a product: all heads use it whole
            is_met = function_name(err.node) in _ATTENTION and err.sources > tables
            return set(map(_position, tables)) if is_met else set()
        numbers: dict[str, int] = {}
        for path in err.sources:
            numbers[_position(path)] = numbers.get(_position(path), 0) + self._numel([path])
        return {place for place, number in numbers.items() if number == min(numbers.values()) < max(numbers.values())}

    def _numel(self, paths: Collection[str]) -> int:
        """Return the number of elements of the matrices in layers, or of all their parameters if none is a matrix."""
        named = self.traced.named_parameters(remove_duplicate=False)
        found = [each for name, each in named if any(is_inside(name, path) for path in paths)]
        return sum(each.numel() for each in [each for each in found if each.dim() > 1] or found)


def _can_adapt(node: fx.Node, layouts: LayoutRecords, of_layers: bool) -> bool:
    """Return whether a node may cut whole values, reduce their gradients and reduce its result.

    Whole parameters, constants and values computed from them may meet sharded activations. Any whole value may meet sharded
    parameters. Whole activations may meet sharded ones only if they come from reductions; else the layer stays whole.
    """
    if node.op == "call_module":
        module = layouts.fetch_attr(str(node.target))
        return norm_of(module) is not None and not is_opaque(module) and not layouts.cuts_only
    if node.op not in ("call_function", "call_method"):
        return False
    whole = [other for other in node.all_input_nodes if other not in layouts.sources or other in layouts.replicated_parts]
    activations = [other for other in node.all_input_nodes if other not in whole and other not in layouts.weights]
    if not activations:
        return bool(whole)
    if not whole:
        return not layouts.cuts_only and may_reduce(layouts, node)
    return all(may_cut(layouts, other, of_layers) for other in whole)


_ATTENTION = ("scaled_dot_product_attention", "matmul", "bmm", "baddbmm", "einsum")


def _position(path: str) -> str:
    """Return the position of a layer in repeated blocks: its path without block numbers. List elements keep their own index."""
    owner, _, name = path.rpartition(".")
    return f"{without_block_numbers(owner)}.{name}" if owner else name
