"""The places at which stages of a model can end: its blocks, in the order in which they run."""

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
from ..tracing.flat_trace import cut_positions, is_custom, is_parameterless, trace_flat
from ..tracing.trace_cache import CachedTrace


class Units:
    """A model as a row of units: what runs from the end of one module to that of the next.

    Args:
        root: The model.
        inputs: Its arguments by name, each with a tensor of its own.
        whole: Paths of modules that stay whole, and what is around each is taken apart.
        ends: Those that end a unit, at any depth; default: all of ``whole`` that run.
        all_end: Whether one of ``ends`` after which nothing runs is an error; else it is left out.

    Raises:
        ScheduleError: one of ``ends`` does not run, or nothing runs between two of them, or after the last.
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
            final = [] if all_end else self._finals()
            found = cut_positions(root, self.flat.graph, [path for path in ends if path not in final])
        self.paths = [path for _, path in found]
        """After which module each unit but the last ends."""
        self.positions = [position for position, _ in found]

    def __len__(self) -> int:
        return len(self.positions) + 1

    def kept(self) -> CachedTrace:
        """The trace, for the build."""
        return CachedTrace(self.root, self.inputs, self.whole, self.flat)

    def unit_of(self, position: int) -> int:
        """The unit of the node at a place in the graph."""
        return bisect_left(self.positions, position)

    def calls(self) -> list[tuple[int, str]]:
        """Unit and path of each call of a module, in order."""
        nodes = enumerate(self.nodes)
        return [(self.unit_of(position), str(node.target)) for position, node in nodes if node.op == "call_module"]

    def crossing(self) -> list[int | None]:
        """Bytes that cross each place where a unit ends; None where no stage can end."""
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
        """Bytes that cross each of these cuts, numbers of the units after them.

        Raises:
            TraceError: the stages between them cannot run.
        """
        return _crossing(self._at(cuts))

    def sent_at(self, cuts: Sequence[int]) -> list[int]:
        """The same when the stages are built, which may take blocks apart that hand on what could be made again."""
        coarse = self._at(cuts)
        return _crossing(with_inlined_blocks(self.root, self.inputs, [self.paths[cut - 1] for cut in cuts], coarse) or coarse)

    def refusal(self, cuts: Sequence[int]) -> TraceError | None:
        """Why the stages between these cuts cannot run; None where they can."""
        try:
            self.crossing_at(cuts)
        except TraceError as err:
            return err
        return None

    def _at(self, cuts: Sequence[int]) -> DividedGraph:
        parts = Assigner(self.flat.graph, self.root, [self.positions[cut - 1] for cut in cuts]).run()
        StateOwnership(self.root).check(parts)
        return DividedGraph(self.flat, parts)

    def _last_runs(self) -> list[tuple[int, str]]:
        names = {id(module): name for name, module in self.root.named_modules()}
        known = {names[id(self.root.get_submodule(path))] for path in self.whole}
        calls = self._last_calls()
        end = max(calls.values(), default=0)
        return sorted((index, path) for path, index in calls.items() if path in known and index < end)

    def _finals(self) -> list[str]:
        """Paths of what runs last, and of what that is in."""
        calls = self._last_calls()
        last = max(calls, key=calls.__getitem__, default="")
        return [path for path, _ in self.root.named_modules() if f"{last}.".startswith(f"{path}.")]

    def _last_calls(self) -> dict[str, int]:
        """Return the place in the graph at which each module runs last."""
        return {str(node.target): index for index, node in enumerate(self.nodes) if node.op == "call_module"}


def blocks(root: nn.Module, leaves: Collection[str] = ()) -> list[str]:
    """Paths of the modules that stay whole at first: members of lists, what stands beside the lists, and ``leaves``."""
    return list(_blocks_inside(root, "", leaves))


def is_member(root: nn.Module, path: str) -> bool:
    """Return whether the module is one of a list's."""
    return _is_list(root.get_submodule(paths.split(path)[0]))


def inner_blocks(root: nn.Module, path: str, leaves: Collection[str] = ()) -> list[str]:
    """Return the parts of a block: only itself, where nothing is known to be inside."""
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
    """Return whether the module only holds others, which the module around it runs."""
    return isinstance(module, nn.ModuleDict) or (is_module_list(module) and not isinstance(module, nn.Sequential))


def _is_divided(module: nn.Module) -> bool:
    """Return whether the module is a container, or its own forward runs the members of a list inside."""
    if is_opaque(module):
        return False
    if _is_list(module) or _has_no_forward(module):
        return True
    return any(_is_divided(child) for child in module.children() if not isinstance(child, nn.Sequential))


def _crossing(flat: DividedGraph) -> list[int]:
    return [sum(map(node_bytes, received)) for received in flat.parts.received[1:]]
