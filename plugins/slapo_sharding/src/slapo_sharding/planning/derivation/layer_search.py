"""A tensor-parallel plan from the traced graph of a model: which layers can be split together, found by trying.

Every layer is first split along its output. Where a value sharded like that does not fit an operation, the layers it comes
from are tried as fused ones (q, k and v in one), and else stay whole. What remains are groups of column layers whose output
stays sharded, through activations or attention, until row layers take it in and sum it up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from slapo_tracing.nodes import function_name, is_opaque

from ...rules.convolutions import channel_dim
from ...splitting.module_paths import ancestors, without_block_numbers
from ...syncs.sharded_norms import norm_of
from ..dry_run.fused_sizes import fused_sizes, other_split
from ..dry_run.layout_adaptation import may_cut, may_reduce, needs_statistics
from ..dry_run.layouts import LayoutError, Layouts
from ..dry_run.parallel_branches import Branches
from ..dry_run.split_specs import ParameterSplit, Split
from ..local_sizes.adapted_modules import is_inside
from .direct_parameters import cut_parameters, direct_parameters, fused_splits
from .mixed_parameters import mixed_parameters
from .residual_streams import residual_streams

Adapts = Literal["", "parameters", "all"]


@dataclass
class Derived:
    """A plan.

    Args:
        layouts: The dry run that showed the plan right.
        reasons: Path of a layer that stays whole to why.
        copied: Attention modules of whose key heads ranks hold copies.
    """

    layouts: Layouts
    reasons: dict[str, str] = field(default_factory=dict)
    copied: list[nn.Module] = field(default_factory=list)

    @property
    def splits(self) -> dict[str, Split]:
        """Path of a layer to how it is split."""
        return self.layouts.splits

    @property
    def parameters(self) -> Mapping[str, ParameterSplit]:
        """Name of a parameter that a forward uses itself to how it is split."""
        return self.layouts.parameters

    def splits_parameter(self, name: str) -> bool:
        """Return whether a parameter is split, or the layer that it is in."""
        return name in self.parameters or any(path in self.splits for path in ancestors(name))

    def __len__(self) -> int:
        return len(self.splits) + len(self.parameters)


def derive(
    traced: fx.GraphModule,
    mesh: DeviceMesh,
    is_layer: Callable[..., bool],
    is_table: Callable[[nn.Module], bool],
    left_whole: Collection[nn.Module] = (),
    adapts: Adapts = "",
    opaque: Collection[str] = (),
    unadapted: Collection[str] = (),
    whole_parameters: Collection[str] = (),
    dealt: Collection[Branches] = (),
) -> Derived:
    """The plan that splits as many layers as can be.

    Args:
        traced: A flat graph of the model in which no layer and no table is inlined.
        mesh: The tensor-parallel group, as a mesh of one dimension.
        is_layer: Whether a module is a layer that can be split: either way, or with a second argument such that its output
            is ``"sharded"`` or ``"partial"``.
        is_table: Whether a module is an embedding that can be split along its output. Such are split where it helps: a table
            of position biases has one column per head.
        left_whole: Modules that are not split, whatever they are.
        adapts: Which whole values may be cut where they meet sharded ones: parameters and constants, or all, with their
            gradients summed.
        opaque: Paths of modules that cannot be traced.
        unadapted: Kinds of the modules in whose forwards no whole values are cut.
        whole_parameters: Names of parameters that are not split, and paths of modules that hold no others.
        dealt: Branches of which each rank runs some, if their results fit.
    """
    own = {name for each in dealt for names in each.parameters for name in names}
    options = direct_parameters(traced, {*whole_parameters, *own}) if adapts == "all" else {}
    return _Search(traced, mesh, is_layer, is_table, left_whole, adapts, opaque, unadapted, options, dealt).run()


class _Search:
    def __init__(
        self,
        traced: fx.GraphModule,
        mesh: DeviceMesh,
        is_layer: Callable[..., bool],
        is_table: Callable[..., bool],
        left_whole: Collection[nn.Module],
        adapts: Adapts,
        opaque: Collection[str],
        unadapted: Collection[str],
        options: dict[str, list[ParameterSplit]],
        dealt: Collection[Branches],
    ) -> None:
        self.dealt = [*dealt]
        self.adapts, self.opaque, self.unadapted = adapts, opaque, unadapted
        self.traced, self.mesh, self.is_layer, self.is_table = traced, mesh, is_layer, is_table
        self.left_whole = left_whole
        self.calls: dict[str, list[fx.Node]] = {}
        for node in traced.graph.find_nodes(op="call_module"):
            self.calls.setdefault(str(node.target), []).append(node)
        named = {path: module for path in self.calls if (module := traced.get_submodule(path)) not in left_whole}
        self.candidates = {path: Split("sharded") for path, module in named.items() if is_layer(module, "sharded")}
        self.reasons: dict[str, str] = {}
        for path in residual_streams(traced, is_layer, self.candidates):
            del self.candidates[path]
            self.reasons[path] = "it adds to the values between blocks"
        self.tables = {path for path, module in named.items() if is_table(module)}
        self.shared: set[str] = set()
        self.summed_by_use: set[str] = set()
        self.options = options  # of each parameter, those left to try
        self.all_tables = frozenset(self.tables)
        self.filled: dict[fx.Node, int] = {}
        self.tried: set[fx.Node] = set()
        self.adapted: set[fx.Node] = set()
        self.gave_way: dict[frozenset[str], dict[str, Split]] = {}  # to layers at fault, those that were left whole instead
        self.as_one: dict[str, str] = {}  # why layers that are tried as fused do not fit unfused

    def run(self) -> Derived:
        while True:
            parameters = {name: splits[0] for name, splits in self.options.items()}
            for each in self.dealt:
                parameters |= each.splits(self.mesh.size())
            layouts = Layouts(
                *(self.traced, self.mesh, self.candidates, self.filled, self.is_layer, self.left_whole),
                adapted=self.adapted,
                opaque=self.opaque,
                parameters=parameters,
                shared=self.shared,
                dealt=self.dealt,
                summed_by_use=self.summed_by_use,
                cuts_only=self.adapts == "parameters",
            )
            try:
                layouts.check()
            except LayoutError as err:
                self.retreat(err)
            else:
                if not (mixed := mixed_parameters(layouts)) <= self.summed_by_use:
                    self.summed_by_use |= mixed
                    continue
                more = cut_parameters(layouts, self.traced) if self.options else {}
                if not (more := {name: split for name, split in more.items() if name not in self.reasons}):
                    return Derived(layouts, self.reasons)
                self.options.update({name: [split] for name, split in more.items()})

    def retreat(self, err: LayoutError) -> None:
        """Split a table too, or what is filled with one number, or try the layers at fault as fused, or leave them whole."""
        if unfit := [each for each in self.dealt if err.sources & each.splits(1).keys()]:
            self.dealt = [each for each in self.dealt if each not in unfit]
            return
        if not err.sources:  # nothing but what is filled is sharded here
            self.filled.clear()
            return
        whole = [other for other in err.node.all_input_nodes if other not in err.layouts.sources]
        behind = _behind(whole)
        tables = {str(node.target) for node in behind if node.op == "call_module"} & self.tables
        if tables and not err.sources & self.tables:
            self.candidates.update(dict.fromkeys(sorted(tables), Split("sharded")))
            self.tables -= tables
            return
        filled = {node: dim for node in behind if node.target in _FILLS for dim in _dims(node, err.sharded_sizes())}
        if filled.keys() - self.tried:
            self.filled.update(filled)
            self.tried |= filled.keys()
            return
        if self._adapt(err.node, err.layouts):
            return
        given = [other for other in err.node.all_input_nodes if other in err.layouts.sources]
        weights = {name for other in given if other in err.layouts.weights for name in err.layouts.sources[other]}
        if weights and any(other not in err.layouts.weights for other in given):
            self._try_next(weights, str(err))
            return
        if (err.sources not in self.gave_way) and (beside := self._lighter_beside(err, behind)):
            places = {_place(path) for path in beside}
            others = {path: split for path, split in self.candidates.items() if _place(path) in places}
            self.gave_way[err.sources] = others
            for path in others:
                del self.candidates[path]
                self.reasons[path] = str(err)
            return
        if self._adapt(err.node, err.layouts, of_layers=True):
            return
        if lightest := self._lightest(err):
            for path in [path for path in (*self.candidates, *self.options) if _place(path) in lightest]:
                (self.candidates if path in self.candidates else self.options).pop(path)
                self.reasons[path] = f"each rank uses all it gives on a part of the heads: {err}"
                self.shared.add(path)
            return
        self._try_next(err.sources & self.options.keys(), str(err), err.layouts)
        places = {_place(path) for path in err.sources}
        for path in [path for path in self.candidates if _place(path) in places]:
            dim = channel_dim(self.traced.get_submodule(path))
            other = other_split(self.candidates[path], self.calls[path], dim) if self._are_alike(err.sources) else None
            if other is not None:
                self.candidates[path] = other
                self.as_one.setdefault(path, f"{err}; in {len(other.blocks)} parts: ")
            else:
                self.reasons[path] = (self.as_one[path] if self.candidates.pop(path).blocks else "") + str(err)
                self._take_back(path)

    def _are_alike(self, sources: Collection[str]) -> bool:
        """Return whether the model takes the same parts out of the output of all these layers, or there is but one."""
        calls = {path: self.calls.get(path, []) for path in sources}
        found = {fused_sizes(each, channel_dim(self.traced.get_submodule(path))) for path, each in calls.items() if each}
        return len(sources) == 1 or (all(calls.values()) and len(found) == 1 and () not in found)

    def _take_back(self, path: str) -> None:
        """Split the layers again that gave way to one that now stays whole itself."""
        for sources, others in self.gave_way.items():
            if path in sources:
                self.candidates.update(others)
                for other in others:
                    self.reasons.pop(other, None)
                others.clear()

    def _adapt(self, node: fx.Node, layouts: Layouts, of_layers: bool = False) -> bool:
        """Let a node, and those of the same line in identical modules, cut whole values and add up partial results."""
        module = without_block_numbers(node.meta.get("module", ""))
        if not self.adapts or module in self.unadapted or node in self.adapted or not _can_adapt(node, layouts, of_layers):
            return False
        if layouts.sources[node] & self.all_tables and needs_statistics(layouts, node):
            return False  # of what an embedding gives all would be split along the width
        alike = (node.target, node.meta.get("source"), module)
        for other in self.traced.graph.nodes:
            if (
                other.target,
                other.meta.get("source"),
                without_block_numbers(other.meta.get("module", "")),
            ) == alike and other.op == node.op:
                self.adapted.add(other)
        return True

    def _try_next(self, names: Collection[str], reason: str, layouts: Layouts | None = None) -> None:
        """Split parameters, and those at the same places, otherwise: as fused ones, along another dimension, or not at all.

        Args:
            names: Of the parameters.
            reason: Why they do not fit as they are.
            layouts: The dry run, where they may be fused.
        """
        for place in {_place(name) for name in names}:
            alike = [name for name in self.options if _place(name) == place]
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

    def _lighter_beside(self, err: LayoutError, behind: list[fx.Node]) -> set[str]:
        """Return the layers to leave whole instead of those at fault, where they have fewer numbers.

        They are the first of a pair whose reduced output is the whole value that met sharded ones: with the first whole, the
        second is split as the layer at fault is. So an adapter gives way to the layer that it stands beside. In an attention
        one that is as large gives way as well: with it whole, the heads are split.
        """
        splits, sources = err.layouts.splits, err.layouts.sources
        seconds = [node for node in behind if node.op == "call_module" and splits.get(str(node.target)) == Split("reduced")]
        firsts = {path for node in seconds for other in node.all_input_nodes for path in sources.get(other, ())}
        firsts &= self.candidates.keys() - err.sources
        ours, theirs = self._numbers(firsts), self._numbers(err.sources)
        return firsts if ours < theirs or (ours == theirs and function_name(err.node) in _ATTENTION) else set()

    def _lightest(self, err: LayoutError) -> set[str]:
        """Return the places of the layers to leave whole first, where heavier ones meet them: keys of one head, say.

        Ranks then use what these layers give each on its part, with its gradient summed.
        """
        module, tables = without_block_numbers(err.node.meta.get("module", "")), err.sources & self.all_tables
        if self.adapts != "all" or module in self.unadapted:
            return set()
        if tables:  # of distances, say, which queries meet in a product: all heads use the whole of it
            is_met = function_name(err.node) in _ATTENTION and err.sources > tables
            return set(map(_place, tables)) if is_met else set()
        numbers: dict[str, int] = {}
        for path in err.sources:
            numbers[_place(path)] = numbers.get(_place(path), 0) + self._numbers([path])
        return {place for place, number in numbers.items() if number == min(numbers.values()) < max(numbers.values())}

    def _numbers(self, paths: Collection[str]) -> int:
        """Return how many numbers the matrices of layers have, or these layers' parameters if none is a matrix."""
        named = self.traced.named_parameters(remove_duplicate=False)
        found = [each for name, each in named if any(is_inside(name, path) for path in paths)]
        return sum(each.numel() for each in [each for each in found if each.dim() > 1] or found)


def _can_adapt(node: fx.Node, layouts: Layouts, of_layers: bool) -> bool:
    """Return whether a node may be given parts of whole values, sum their gradients, and add up its result, on sharded ones.

    Parameters, constants and what is made of these may meet sharded activations, and any whole value sharded parameters. Where
    whole activations meet sharded ones the layer stays whole, but for values that were added up.
    """
    if node.op == "call_module":
        module = layouts.fetch_attr(str(node.target))
        return norm_of(module) is not None and not is_opaque(module) and not layouts.cuts_only
    if node.op not in ("call_function", "call_method"):
        return False
    whole = [other for other in node.all_input_nodes if other not in layouts.sources or other in layouts.copies]
    activations = [other for other in node.all_input_nodes if other not in whole and other not in layouts.weights]
    if not activations:
        return bool(whole)
    if not whole:
        return not layouts.cuts_only and may_reduce(layouts, node)
    return all(may_cut(layouts, other, of_layers) for other in whole)


def _behind(nodes: list[fx.Node]) -> list[fx.Node]:
    """Everything that values are made from without going through a module, and the modules where it ends."""
    found = list(nodes)
    for node in found:
        if node.op != "call_module":
            found += [more for more in node.all_input_nodes if more not in found]
    return found


_ATTENTION = ("scaled_dot_product_attention", "matmul", "bmm", "baddbmm", "einsum")

_FILLS = (torch.zeros, torch.ones, torch.full, "new_zeros", "new_ones", "new_full")


def _dims(node: fx.Node, sizes: set[int]) -> list[int]:
    return [dim for dim, size in enumerate(node.meta["val"].shape) if size in sizes]


def _place(path: str) -> str:
    """The same for the layers at one place of the repeated blocks; layers in one list are at places of their own."""
    owner, _, name = path.rpartition(".")
    return f"{without_block_numbers(owner)}.{name}" if owner else name
