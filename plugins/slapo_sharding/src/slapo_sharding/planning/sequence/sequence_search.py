"""Search for a split of the sequence between the layers of a model.

The input of the repeated layers is scattered, and the output of row-parallel layers is reduce-scattered. Where the dry run
then meets an operation that needs the whole sequence, the value is gathered. The gather is at the outermost module that the
value enters unchanged, or at the output of the module that made it. The whole output of such a module is scattered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import fx, nn

from ...splitting.module_paths import without_block_numbers
from ..dry_run.layout_records import LayoutError
from ..dry_run.layouts import Layouts
from .module_boundaries import Backward, Boundary, BoundaryCollective, SequencePlan, boundary
from .sequence_layouts import BoundaryError, LengthError, MixedUseError, PartialGradientError, SequenceLayouts

_MAX_DRY_RUNS = 200  # every dry run adds to the plan


class SequenceSplitError(Exception):
    """Error of a model whose sequence cannot be split between the layers."""


def split_sequence(layouts: Layouts) -> SequenceLayouts:
    """Find the boundaries at which the sequence is scattered and gathered, in a graph traced inside ``mark_boundaries``.

    Raises:
        SequenceSplitError: no split was found; the message has the reason.
    """
    try:
        return _Search(layouts, flattens=False).run()
    except SequenceSplitError as first:
        try:
            return _Search(layouts, flattens=True).run()
        except SequenceSplitError:
            raise first from first.__cause__


class _Search:
    def __init__(self, layouts: Layouts, flattens: bool) -> None:
        self.layouts, self.plan = layouts, SequencePlan(flattens=flattens)
        self.modules = dict(layouts.traced.named_modules())
        self.excluded: set[Boundary] = set()
        self.starts: dict[Boundary, list[Boundary]] = {}
        for is_list in (lambda module: isinstance(module, nn.ModuleList), _is_sequence_of_blocks):
            for blocks in () if self.starts else _block_lists(layouts.traced, is_list):
                self._start(blocks)
        if not self.starts:
            kinds = "nn.ModuleList, or nn.Sequential of one class"
            raise SequenceSplitError(f"no list of layers ({kinds}) has inputs of shape [batch, sequence, width]")

    def _start(self, blocks: list[str]) -> None:
        """Scatter the input of the first layer in a list."""
        nodes = self.layouts.graph.find_nodes(op="call_function", target=boundary)
        node = next((node for node in nodes if node.args[1] in blocks and node.args[2] == "fwd_pre"), None)
        if node is None or not any(path.startswith(f"{block}.") for path in self.layouts.splits for block in blocks):
            return
        shape, size = tuple(node.meta["val"].shape), self.layouts.mesh.size()
        if len(shape) != 3:
            return
        inputs = [node.meta.get("val") for node in self.layouts.graph.find_nodes(op="placeholder")]
        if shape[0] not in {length for value in inputs if isinstance(value, torch.Tensor) for length in value.shape[:1]}:
            raise SequenceSplitError(f"{node.args[1]!r} has inputs of shape {list(shape)}, not [batch, sequence, width]")
        if shape[1] % size:
            raise SequenceSplitError(f"the sequence in {node.args[1]!r} has length {shape[1]}, not divisible by {size} ranks")
        self.plan.blocks.update(dict.fromkeys(blocks, shape))
        first, *others = self._upstream(node)
        self.starts[first] = others
        self.plan.collectives[first] = BoundaryCollective("scatter")

    def run(self) -> SequenceLayouts:
        for _ in range(_MAX_DRY_RUNS):
            layouts = SequenceLayouts(self.layouts, self.plan)
            try:
                layouts.check()
            except LayoutError as err:
                self._adjust(layouts, err)
            else:
                if not self._reduce_in_layers(layouts):
                    return layouts
        raise SequenceSplitError(f"no split was found in {_MAX_DRY_RUNS} dry runs")

    def _adjust(self, layouts: SequenceLayouts, err: LayoutError) -> None:
        """Change the plan at the node where the dry run failed; raise ``SequenceSplitError`` if no change is left to try."""
        if isinstance(err, MixedUseError):
            done = False
        elif isinstance(err, PartialGradientError):
            done = self._keep_whole(err.places)
        elif isinstance(err, LengthError):
            done = self._gather_around(err.module)
        elif isinstance(err, BoundaryError):
            done = self._try_next_boundary(err)
        else:
            done = self._scatter_again(layouts, err.node) or self._gather(layouts, err.node)
        if not done:
            raise SequenceSplitError(str(err)) from err

    def _keep_whole(self, places: Iterable[Boundary]) -> bool:
        """Run everything from these gathers to the end of their modules on the whole sequence, on every rank."""
        new = [place for place in places if place[0] not in self.plan.whole]
        for place in new:
            self._add(place, BoundaryCollective("all_gather", "split"))
            self.plan.whole.update(path for path, _ in self._same_in_blocks(place))
        return bool(new)

    def _gather_around(self, path: str) -> bool:
        """Run a module that takes sizes from its input on the whole sequence."""
        if path in self.plan.blocks or path in self.plan.whole:
            return False
        for outer, _ in self._same_in_blocks((path, "")):
            for place in [place for place in self.plan.collectives if place[0].startswith(f"{outer}.")]:
                del self.plan.collectives[place]
        self._keep_whole([(path, "fwd_pre")])
        self._add((path, "fwd_post"), BoundaryCollective("scatter"))
        return True

    def _try_next_boundary(self, err: BoundaryError) -> bool:
        """Move a scatter to the next boundary of its value, or exclude the boundary of a gather."""
        if err.place not in self.starts:
            self._exclude(err.place)
            return True
        others = self.starts.pop(err.place)
        del self.plan.collectives[err.place]
        if others:
            self.plan.collectives[others[0]] = BoundaryCollective("scatter")
            self.starts[others[0]] = others[1:]
        return bool(others)

    def _scatter_again(self, layouts: SequenceLayouts, n: fx.Node) -> bool:
        """Scatter a gathered value that meets a split one where it leaves its module, else undo the gather; return success."""
        for other in n.all_input_nodes:
            places = layouts.gathered.get(other, frozenset())
            if not places:
                continue
            same = places.intersection(self._upstream(other))  # the gathered value itself
            if same:
                self._exclude(min(same))
                return True
            end = self._last_boundary(layouts, other)
            if end is not None and end not in self.plan.collectives:
                self._keep_whole(places)
                self._add(end, BoundaryCollective("scatter"))
                return True
        return False

    def _last_boundary(self, layouts: SequenceLayouts, n: fx.Node) -> Boundary | None:
        """Return the boundary where a whole value left the module that gathered, or the last boundary on its way."""
        nearest = None
        while True:
            place = next(self._upstream(n), None)
            if place is not None and place[1] == "fwd_post" and place not in self.excluded:
                if (place[0], "fwd_pre") in self.plan.collectives:
                    return place
                nearest = nearest or place
            before = [other for other in n.all_input_nodes if other in layouts.gathered]
            if len(before) != 1:
                return nearest
            (n,) = before

    def _gather(self, layouts: SequenceLayouts, n: fx.Node) -> bool:
        for other in _tensors_of(n):
            for place in self._candidates(n, other) if layouts.is_split(other) else ():
                if place not in self.excluded and place not in self.plan.collectives:
                    backward: Backward = "split" if self.plan.block_of(place[0]) is None else "reduce_scatter"
                    self._add(place, BoundaryCollective("all_gather", backward, other.meta["val"].dim() - 2))
                    return True
        return False

    def _candidates(self, n: fx.Node, value: fx.Node) -> list[Boundary]:
        """Return the boundaries at which a value that ``n`` needs whole can be gathered, best first."""
        enters = [(str(n.target), "fwd_pre")] if n.op == "call_module" and n.all_input_nodes[0] is value else []
        chain = [*enters, *self._upstream(value)]
        leaves = [place for place in chain if place[1] == "fwd_post"]
        enters = [place for place in chain if place[1] == "fwd_pre" and place[0] not in self.plan.blocks]
        outside = [place for place in leaves if self.plan.block_of(place[0]) is None and place[0] not in self.plan.blocks]
        return [*reversed(outside), *reversed(enters), *leaves]

    def _upstream(self, n: fx.Node) -> Iterator[Boundary]:
        """Yield the boundaries that a value passed unchanged, the last one first."""
        while n.target is boundary:
            place = (str(n.args[1]), str(n.args[2]))
            yield place
            if place in self.plan.collectives and self.plan.collectives[place].op == "scatter":
                return
            (n,) = n.all_input_nodes
        if n.op == "call_module":
            yield str(n.target), "fwd_post"

    def _same_in_blocks(self, place: Boundary) -> list[Boundary]:
        """Return the same boundary of all repeated layers."""
        path, mode = place
        if self.plan.block_of(path) is None:
            return [place]
        cls, kind = type(self.modules[path]), without_block_numbers(path)
        same = (other for other, module in self.modules.items() if type(module) is cls)
        return [(other, mode) for other in same if without_block_numbers(other) == kind]

    def _add(self, place: Boundary, collective: BoundaryCollective) -> None:
        self.plan.collectives.update(dict.fromkeys(self._same_in_blocks(place), collective))

    def _exclude(self, place: Boundary) -> None:
        for other in self._same_in_blocks(place):
            self.excluded.add(other)
            self.plan.collectives.pop(other, None)

    def _reduce_in_layers(self, layouts: SequenceLayouts) -> bool:
        """Reduce gradients in the layers below a gather if one of them reduces that of another value; return if any changed."""
        own = [path for path, summed in layouts.input_gradient_reduced.items() if not summed]
        summing = [place for place, each in self.plan.collectives.items() if each.backward == "reduce_scatter"]
        around = [place for place in summing if any(path.startswith(f"{place[0]}.") for path in own)]
        for place in around:
            self.plan.collectives[place] = replace(self.plan.collectives[place], backward="split")
        return bool(around)


def _tensors_of(n: fx.Node) -> Iterator[fx.Node]:
    """Yield the tensors that enter a node, also inside the structure that a model returns."""
    for other in n.all_input_nodes:
        if "val" in other.meta:
            yield other
        else:
            yield from _tensors_of(other)


def _block_lists(root: nn.Module, is_list: Callable[[nn.Module], bool]) -> Iterator[list[str]]:
    """Yield the paths of the layers in each outermost list."""
    found: list[str] = []
    for path, module in root.named_modules():
        if is_list(module) and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
            yield [f"{path}.{name}" for name, _ in module.named_children()]


def _is_sequence_of_blocks(module: nn.Module) -> bool:
    kinds = {type(child) for child in module.children()}
    return isinstance(module, nn.Sequential) and len(kinds) == 1 < len(module) and all(any(each.children()) for each in module)
