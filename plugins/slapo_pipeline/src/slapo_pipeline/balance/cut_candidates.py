"""Candidates for cuts: the ends of a model's blocks, in the order in which they run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from slapo_core import TraceError, is_module_list, paths
from slapo_tracing.nodes import is_opaque

from ..assignment.block_inlining import DividedGraph, with_inlined_blocks
from ..assignment.min_cut import node_bytes
from ..assignment.node_assignment import Assigner
from ..assignment.state_ownership import StateOwnership
from ..tracing.flat_trace import CachedTrace, cut_positions, is_custom, is_parameterless, trace_flat


class Units:
    """A model as a sequence of units: the nodes from the end of one module to the end of the next.

    Args:
        whole: Paths of the modules that are one node each; the modules around them are inlined.
        ends: Paths of the modules that end a unit, at any depth; default: all of ``whole`` that run.
        all_end: Whether an entry of ``ends`` with nothing after it is an error; else it is left out.

    Raises:
        ScheduleError: an entry of ``ends`` does not run, or nothing runs between two of them, or after the last.
        TraceError: the model cannot be traced.
    """

    def __init__(
        self,
        root: nn.Module,
        inputs: Mapping[str, Any],
        whole: Sequence[str],
        ends: Sequence[str] | None = None,
        *,
        all_end: bool = True,
    ) -> None:
        self.root, self.inputs, self.whole = root, inputs, whole
        self.flat = trace_flat(root, inputs, whole)
        self.nodes = list(self.flat.graph.nodes)
        if ends is None:
            found = self._last_runs()
        else:
            final = [] if all_end else self._final_paths()
            found = cut_positions(root, self.flat.graph, [path for path in ends if path not in final])
        self.paths = [path for _, path in found]
        """Path of the module that ends each unit but the last."""
        self.positions = [position for position, _ in found]

    def __len__(self) -> int:
        return len(self.positions) + 1

    def cached_trace(self) -> CachedTrace:
        """Return the trace, for the build."""
        return CachedTrace(self.root, self.inputs, self.whole, self.flat)

    def unit_of(self, position: int) -> int:
        """Return the unit of the node at a position in the graph."""
        return bisect_left(self.positions, position)

    def calls(self) -> list[tuple[int, str]]:
        nodes = enumerate(self.nodes)
        return [(self.unit_of(position), str(node.target)) for position, node in nodes if node.op == "call_module"]

    def crossing_bytes(self) -> list[int | None]:
        """Return the bytes that cross the end of each unit but the last; None where no stage can end."""
        cuts = range(1, len(self))
        try:
            return list(self.crossing_at(cuts))
        except TraceError:
            return [self._crossing_alone(cut) for cut in cuts]

    def _crossing_alone(self, cut: int) -> int | None:
        try:
            return self.crossing_at([cut])[0]
        except TraceError:
            return None

    def crossing_at(self, cuts: Sequence[int]) -> list[int]:
        """Return the bytes that cross each of these cuts, given as the index of the unit after the cut.

        Raises:
            TraceError: the stages between them cannot run.
        """
        return _sent_bytes(self._divide_at(cuts))

    def sent_at(self, cuts: Sequence[int]) -> list[int]:
        """Return the bytes that cross these cuts in the built stages, which may have blocks inlined to send fewer."""
        coarse = self._divide_at(cuts)
        return _sent_bytes(with_inlined_blocks(self.root, self.inputs, [self.paths[cut - 1] for cut in cuts], coarse) or coarse)

    def refusal(self, cuts: Sequence[int]) -> TraceError | None:
        """Return the error of the stages between these cuts, or None if they can run."""
        try:
            self.crossing_at(cuts)
        except TraceError as err:
            return err
        return None

    def _divide_at(self, cuts: Sequence[int]) -> DividedGraph:
        assignment = Assigner(self.flat.graph, self.root, [self.positions[cut - 1] for cut in cuts]).run()
        StateOwnership(self.root).check(assignment)
        return DividedGraph(self.flat, assignment)

    def _last_runs(self) -> list[tuple[int, str]]:
        names = {id(module): name for name, module in self.root.named_modules()}
        known = {names[id(self.root.get_submodule(path))] for path in self.whole}
        calls = self._last_calls()
        end = max(calls.values(), default=0)
        return sorted((index, path) for path, index in calls.items() if path in known and index < end)

    def _final_paths(self) -> list[str]:
        """Return the paths of the module that runs last and of the modules around it."""
        calls = self._last_calls()
        last = max(calls, key=calls.__getitem__, default="")
        return [path for path, _ in self.root.named_modules() if f"{last}.".startswith(f"{path}.")]

    def _last_calls(self) -> dict[str, int]:
        """Return the place in the graph at which each module runs last."""
        return {str(node.target): index for index, node in enumerate(self.nodes) if node.op == "call_module"}


def blocks(root: nn.Module, leaves: Collection[str] = ()) -> list[str]:
    """Return the paths of the blocks: members of module lists, modules beside such lists, and ``leaves``."""
    return list(_blocks_inside(root, "", leaves))


def is_member(root: nn.Module, path: str) -> bool:
    """Return whether the module is a member of a module list."""
    return _is_list(root.get_submodule(paths.split(path)[0]))


def inner_blocks(root: nn.Module, path: str, leaves: Collection[str] = ()) -> list[str]:
    """Return the blocks inside a block, or the block itself if it cannot be divided."""
    module = root.get_submodule(path)
    is_whole = path in leaves or is_opaque(module) or not (is_custom(module) or _is_list(module))
    return [path] if is_whole else list(_blocks_inside(module, path, leaves)) or [path]


def _blocks_inside(module: nn.Module, path: str, leaves: Collection[str]) -> Iterator[str]:
    for name, child in module._modules.items():
        here = paths.join(path, name)
        if child is None or is_parameterless(child):
            continue
        if here in leaves or (not _has_no_forward(child) and (_is_list(module) or not _is_divided(child))):
            yield here
        else:
            yield from _blocks_inside(child, here, leaves)


def _is_list(module: nn.Module) -> bool:
    return is_module_list(module) or isinstance(module, nn.Sequential)


def _has_no_forward(module: nn.Module) -> bool:
    """Return whether the module is a container whose members are called by the module around it."""
    return isinstance(module, nn.ModuleDict) or (is_module_list(module) and not isinstance(module, nn.Sequential))


def _is_divided(module: nn.Module) -> bool:
    """Return whether the module is a container, or has a module list inside whose members its forward calls."""
    if is_opaque(module):
        return False
    if _is_list(module) or _has_no_forward(module):
        return True
    return any(_is_divided(child) for child in module.children() if not isinstance(child, nn.Sequential))


def _sent_bytes(flat: DividedGraph) -> list[int]:
    return [sum(map(node_bytes, received)) for received in flat.assignment.received[1:]]
