"""A tensor-parallel plan from the traced graph of a model: which layers can be split together, found by trying.

Every layer is first split along its output. Where a value sharded like that does not fit an operation, the layers it comes
from are tried as fused ones (q, k and v in one), and else stay whole. What remains are groups of column layers whose output
stays sharded, through activations or attention, until row layers take it in and sum it up.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from slapo_core.tracing.graph_ops import expect

from .layouts import LayoutError, Layouts, Split, has_gradient, parameters_of, slice_bounds


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


def derive(
    traced: fx.GraphModule,
    mesh: DeviceMesh,
    is_layer: Callable[..., bool],
    is_table: Callable[[nn.Module], bool],
    left_whole: Collection[nn.Module] = (),
    adapts: bool = False,
    opaque: Collection[str] = (),
    unadapted: Collection[str] = (),
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
        adapts: Whether whole values may be cut, and their gradients summed, where they meet sharded ones.
        opaque: Paths of modules that cannot be traced.
        unadapted: Kinds of the modules in whose forwards no whole values are cut.
    """
    return _Search(traced, mesh, is_layer, is_table, left_whole, adapts, opaque, unadapted).run()


class _Search:
    def __init__(
        self,
        traced: fx.GraphModule,
        mesh: DeviceMesh,
        is_layer: Callable[..., bool],
        is_table: Callable[..., bool],
        left_whole: Collection[nn.Module],
        adapts: bool,
        opaque: Collection[str],
        unadapted: Collection[str],
    ) -> None:
        self.adapts, self.opaque, self.unadapted = adapts, opaque, unadapted
        self.traced, self.mesh, self.is_layer, self.is_table = traced, mesh, is_layer, is_table
        self.left_whole = left_whole
        self.calls: dict[str, list[fx.Node]] = {}
        for node in traced.graph.find_nodes(op="call_module"):
            self.calls.setdefault(str(node.target), []).append(node)
        named = {path: module for path in self.calls if (module := traced.get_submodule(path)) not in left_whole}
        self.candidates = {path: Split("sharded") for path, module in named.items() if is_layer(module, "sharded")}
        self.tables = {path for path, module in named.items() if is_table(module)}
        self.filled: dict[fx.Node, int] = {}
        self.tried: set[fx.Node] = set()
        self.adapted: set[fx.Node] = set()
        self.reasons: dict[str, str] = {}
        self.as_one: dict[str, str] = {}  # why layers that are tried as fused do not fit unfused

    def run(self) -> Derived:
        while True:
            layouts = Layouts(
                *(self.traced, self.mesh, self.candidates, self.filled, self.is_layer, self.left_whole),
                adapted=self.adapted,
                opaque=self.opaque,
            )
            try:
                layouts.check()
            except LayoutError as err:
                self.retreat(err)
            else:
                return Derived(layouts, self.reasons)

    def retreat(self, err: LayoutError) -> None:
        """Split a table too, or what is filled with one number, or try the layers at fault as fused, or leave them whole."""
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
        is_free = self.adapts and kind(err.node.meta.get("module", "")) not in self.unadapted
        if is_free and err.node not in self.adapted and _can_adapt(err.node, whole):
            self.adapted.add(err.node)
            return
        if beside := self._lighter_beside(err, behind):
            kinds = {kind(path) for path in beside}
            for path in [path for path in self.candidates if kind(path) in kinds]:
                del self.candidates[path]
                self.reasons[path] = str(err)
            return
        places = {_place(path) for path in err.sources}
        for path in [path for path in self.candidates if _place(path) in places]:
            blocks = fused_sizes(self.calls[path]) if len(err.sources) == 1 and not self.candidates[path].blocks else ()
            if blocks:
                self.candidates[path] = Split("sharded", blocks)
                self.as_one[path] = f"{err}; in {len(blocks)} parts: "
            else:
                self.reasons[path] = (self.as_one[path] if self.candidates.pop(path).blocks else "") + str(err)

    def _lighter_beside(self, err: LayoutError, behind: list[fx.Node]) -> set[str]:
        """Return the layers to leave whole instead of those at fault, where they have fewer numbers.

        They are the first of a pair whose reduced output is the whole value that met sharded ones: with the first whole, the
        second is split as the layer at fault is. So an adapter gives way to the layer that it stands beside.
        """
        splits, sources = err.layouts.splits, err.layouts.sources
        seconds = [node for node in behind if node.op == "call_module" and splits.get(str(node.target)) == Split("reduced")]
        firsts = {path for node in seconds for other in node.all_input_nodes for path in sources.get(other, ())}
        firsts &= self.candidates.keys() - err.sources
        return firsts if self._numbers(firsts) < self._numbers(err.sources) else set()

    def _numbers(self, paths: Collection[str]) -> int:
        return sum(parameter.numel() for path in paths for parameter in self.traced.get_submodule(path).parameters())


def _can_adapt(node: fx.Node, whole: list[fx.Node]) -> bool:
    """Return whether a node may be given parts of whole values, and sum their gradients, to run on sharded ones.

    Parameters, constants and what is made of these may be. Where whole activations meet sharded ones the layer stays whole.
    """
    if not whole or node.op not in ("call_function", "call_method"):
        return False
    return all(not has_gradient(other) or parameters_of(other) for other in whole)


def _behind(nodes: list[fx.Node]) -> list[fx.Node]:
    """Everything that values are made from without going through a module, and the modules where it ends."""
    found = list(nodes)
    for node in found:
        if node.op != "call_module":
            found += [more for more in node.all_input_nodes if more not in found]
    return found


_FILLS = (torch.zeros, torch.ones, torch.full, "new_zeros", "new_ones", "new_full")


def _dims(node: fx.Node, sizes: set[int]) -> list[int]:
    return [dim for dim, size in enumerate(node.meta["val"].shape) if size in sizes]


def kind(path: str) -> str:
    """The same for the modules at one place of the repeated blocks."""
    return ".".join("*" if name.isdigit() else name for name in path.split("."))


def _place(path: str) -> str:
    """The same for the layers at one place of the repeated blocks; layers in one list are at places of their own."""
    owner, _, name = path.rpartition(".")
    return f"{kind(owner)}.{name}" if owner else name


def fused_sizes(calls: list[fx.Node]) -> tuple[int, ...]:
    """Sizes of the parts that the model takes out of a layer's output; empty when it uses the output as one."""
    found = {_parts(call) for call in calls}
    return found.pop() if len(found) == 1 else ()


def _parts(call: fx.Node) -> tuple[int, ...]:
    value, users = call.meta["val"], [user for user in call.users if user.target is not expect]
    if all(user.target is operator.getitem for user in users):
        bounds = [slice_bounds(user.args[1], value) for user in users]
        ordered = sorted({bound for bound in bounds if bound is not None})
        tiles = [0, *(stop for _, stop in ordered)] == [*(start for start, _ in ordered), value.shape[-1]]
        return tuple(stop - start for start, stop in ordered) if tiles and None not in bounds else ()
    if len(users) != 1:
        return ()
    name = users[0].target if users[0].op == "call_method" else getattr(users[0].target, "__name__", "")
    if name in ("split", "chunk", "tensor_split"):
        parts = [user.meta["val"].shape for user in users[0].users]
        whole = sum(shape[-1] for shape in parts) == value.shape[-1]
        return tuple(shape[-1] for shape in parts) if whole and len(parts) > 1 else ()
    if name in ("view", "reshape"):
        shape = users[0].meta["val"].shape
        number = shape[value.dim() - 1] if len(shape) > value.dim() else 0
        return (value.shape[-1] // number,) * number if number > 1 else ()
    return ()
