"""Split of the sequence between the layers of a model, found by trying, as the plan for the layers was.

What enters the repeated layers is scattered, what row-parallel layers return is reduce-scattered. Where the dry run then meets
an operation that needs all of the sequence, the value is gathered at the outermost module that it enters unchanged, or where
it left the module that made it; what comes out of a module whole is scattered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import fx, nn

from ...splitting.module_paths import without_block_numbers
from ..dry_run.layouts import LayoutError, Layouts
from .module_boundaries import Place, border
from .sequence_layouts import BorderError, LengthError, MixedUse, PartError, SequenceLayouts
from .sequence_plan import Backward, Crossing, Plan

_MOST = 200  # dry runs; every one adds to the plan


class CannotSplit(Exception):
    """The sequence cannot be split between the layers of this model."""


def split_sequence(layouts: Layouts) -> SequenceLayouts:
    """Find where the sequence is scattered and gathered.

    Args:
        layouts: The dry run that splits the layers; its graph was traced inside ``marked``.

    Raises:
        CannotSplit: says why.
    """
    try:
        return _Search(layouts, flattens=False).run()
    except CannotSplit as first:
        try:
            return _Search(layouts, flattens=True).run()
        except CannotSplit:
            raise first from first.__cause__


class _Search:
    def __init__(self, layouts: Layouts, flattens: bool) -> None:
        self.layouts, self.plan = layouts, Plan(flattens=flattens)
        self.modules = dict(layouts.traced.named_modules())
        self.banned: set[Place] = set()
        self.starts: dict[Place, list[Place]] = {}
        for is_list in (lambda module: isinstance(module, nn.ModuleList), _is_sequence_of_blocks):
            for blocks in () if self.starts else _block_lists(layouts.traced, is_list):
                self._start(blocks)
        if not self.starts:
            raise CannotSplit(
                "no list of layers (nn.ModuleList, or nn.Sequential of one class) is given values of [batch, sequence, width]"
            )

    def _start(self, blocks: list[str]) -> None:
        """Scatter what enters the first of the layers in a list."""
        nodes = self.layouts.graph.find_nodes(op="call_function", target=border)
        node = next((node for node in nodes if node.args[1] in blocks and node.args[2] == "fwd_pre"), None)
        if node is None or not any(path.startswith(f"{block}.") for path in self.layouts.splits for block in blocks):
            return
        shape, size = tuple(node.meta["val"].shape), self.layouts.mesh.size()
        if len(shape) != 3:
            return
        if shape[0] not in {length for value in _inputs(self.layouts) for length in value.shape[:1]}:
            raise CannotSplit(f"{node.args[1]!r} is given values of shape {list(shape)}, not [batch, sequence, width]")
        if shape[1] % size:
            raise CannotSplit(f"the sequence in {node.args[1]!r} has length {shape[1]}, not divisible by {size} ranks")
        self.plan.blocks.update(dict.fromkeys(blocks, shape))
        first, *others = self._upstream(node)
        self.starts[first] = others
        self.plan.crossings[first] = Crossing("scatter")

    def run(self) -> SequenceLayouts:
        for _ in range(_MOST):
            layouts = SequenceLayouts(self.layouts, self.plan)
            try:
                layouts.check()
            except LayoutError as err:
                self._mend(layouts, err)
            else:
                if not self._summed_twice(layouts):
                    return layouts
        raise CannotSplit("no way to split it was found")

    def _mend(self, layouts: SequenceLayouts, err: LayoutError) -> None:
        """Change the plan where the dry run failed."""
        if isinstance(err, MixedUse):
            done = False
        elif isinstance(err, PartError):
            done = self._keep_whole(err.places)
        elif isinstance(err, LengthError):
            done = self._enclose(err.module)
        elif isinstance(err, BorderError):
            done = self._other_place(err)
        else:
            done = self._scatter_again(layouts, err.node) or self._gather(layouts, err.node)
        if not done:
            raise CannotSplit(str(err)) from err

    def _keep_whole(self, places: Iterable[Place]) -> bool:
        """Run all between these gathers and the end of their modules on the whole sequence, on every rank."""
        new = [place for place in places if place[0] not in self.plan.whole]
        for place in new:
            self._add(place, Crossing("all_gather", "split"))
            self.plan.whole.update(path for path, _ in self._alike(place))
        return bool(new)

    def _enclose(self, path: str) -> bool:
        """Let a module that takes its sizes from its input have all of it."""
        if path in self.plan.blocks or path in self.plan.whole:
            return False
        for outer, _ in self._alike((path, "")):
            for place in [place for place in self.plan.crossings if place[0].startswith(f"{outer}.")]:
                del self.plan.crossings[place]
        self._keep_whole([(path, "fwd_pre")])
        self._add((path, "fwd_post"), Crossing("scatter"))
        return True

    def _other_place(self, err: BorderError) -> bool:
        """Scatter or gather somewhere else."""
        if err.place not in self.starts:
            self._ban(err.place)
            return True
        others = self.starts.pop(err.place)
        del self.plan.crossings[err.place]
        if others:
            self.plan.crossings[others[0]] = Crossing("scatter")
            self.starts[others[0]] = others[1:]
        return bool(others)

    def _scatter_again(self, layouts: SequenceLayouts, n: fx.Node) -> bool:
        """A whole value from a gathered one meets a split one: it is scattered where it left its module, or not gathered."""
        for other in n.all_input_nodes:
            places = layouts.gathered.get(other, frozenset())
            if not places:
                continue
            same = places.intersection(self._upstream(other))  # the very value that was gathered
            if same:
                self._ban(min(same))
                return True
            end = self._end(layouts, other)
            if end is not None and end not in self.plan.crossings:
                self._keep_whole(places)
                self._add(end, Crossing("scatter"))
                return True
        return False

    def _end(self, layouts: SequenceLayouts, n: fx.Node) -> Place | None:
        """Return the place where a whole value left the module that was given a gathered one, or the last module on its way."""
        nearest = None
        while True:
            place = next(self._upstream(n), None)
            if place is not None and place[1] == "fwd_post" and place not in self.banned:
                if (place[0], "fwd_pre") in self.plan.crossings:
                    return place
                nearest = nearest or place
            before = [other for other in n.all_input_nodes if other in layouts.gathered]
            if len(before) != 1:
                return nearest
            (n,) = before

    def _gather(self, layouts: SequenceLayouts, n: fx.Node) -> bool:
        for other in _tensors_of(n):
            for place in self._candidates(n, other) if layouts.is_split(other) else ():
                if place not in self.banned and place not in self.plan.crossings:
                    backward: Backward = "split" if self.plan.block_of(place[0]) is None else "reduce_scatter"
                    self._add(place, Crossing("all_gather", backward, other.meta["val"].dim() - 2))
                    return True
        return False

    def _candidates(self, n: fx.Node, value: fx.Node) -> list[Place]:
        """Return the places at which a value that ``n`` needs whole may be gathered, the better ones first."""
        enters = [(str(n.target), "fwd_pre")] if n.op == "call_module" and n.all_input_nodes[0] is value else []
        chain = [*enters, *self._upstream(value)]
        leaves = [place for place in chain if place[1] == "fwd_post"]
        enters = [place for place in chain if place[1] == "fwd_pre" and place[0] not in self.plan.blocks]
        outside = [place for place in leaves if self.plan.block_of(place[0]) is None and place[0] not in self.plan.blocks]
        return [*reversed(outside), *reversed(enters), *leaves]

    def _upstream(self, n: fx.Node) -> Iterator[Place]:
        """The borders that a value has crossed unchanged, the last one first."""
        while n.target is border:
            place = (str(n.args[1]), str(n.args[2]))
            yield place
            if place in self.plan.crossings and self.plan.crossings[place].op == "scatter":
                return
            (n,) = n.all_input_nodes
        if n.op == "call_module":
            yield str(n.target), "fwd_post"

    def _alike(self, place: Place) -> list[Place]:
        """The same border of all repeated layers."""
        path, mode = place
        if self.plan.block_of(path) is None:
            return [place]
        cls, modules = type(self.modules[path]), self.modules.items()
        return [
            (other, mode)
            for other, module in modules
            if type(module) is cls and without_block_numbers(other) == without_block_numbers(path)
        ]

    def _add(self, place: Place, crossing: Crossing) -> None:
        self.plan.crossings.update(dict.fromkeys(self._alike(place), crossing))

    def _ban(self, place: Place) -> None:
        for other in self._alike(place):
            self.banned.add(other)
            self.plan.crossings.pop(other, None)

    def _summed_twice(self, layouts: SequenceLayouts) -> bool:
        """Leave the sum of gradients to the layers below a gather where one sums another value's; return whether any does."""
        own = [path for path, summed in layouts.summed.items() if not summed]
        around = [
            place
            for place, crossing in self.plan.crossings.items()
            if crossing.backward == "reduce_scatter" and any(path.startswith(f"{place[0]}.") for path in own)
        ]
        for place in around:
            self.plan.crossings[place] = replace(self.plan.crossings[place], backward="split")
        return bool(around)


def _inputs(layouts: Layouts) -> list[torch.Tensor]:
    values = [node.meta.get("val") for node in layouts.graph.find_nodes(op="placeholder")]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _tensors_of(n: fx.Node) -> Iterator[fx.Node]:
    """The tensors that a node is given, also inside of the structure that a model returns."""
    for other in n.all_input_nodes:
        if "val" in other.meta:
            yield other
        else:
            yield from _tensors_of(other)


def _block_lists(root: nn.Module, is_list: Callable[[nn.Module], bool]) -> Iterator[list[str]]:
    """Paths of the layers in each outermost list."""
    found: list[str] = []
    for path, module in root.named_modules():
        if is_list(module) and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
            yield [f"{path}.{name}" for name, _ in module.named_children()]


def _is_sequence_of_blocks(module: nn.Module) -> bool:
    kinds = {type(child) for child in module.children()}
    return isinstance(module, nn.Sequential) and len(kinds) == 1 < len(module) and all(any(each.children()) for each in module)
