"""The flat graph of a model, as deep as its cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from slapo_core.errors import ScheduleError, TraceError
from slapo_core.tracing import TracedModule, trace_module

from .cut_pipeline_stage import NAME


def trace_flat(root: nn.Module, inputs: Mapping[str, Any], cuts: Sequence[str]) -> TracedModule:
    """Trace the model with everything whole that no cut lies in.

    Modules without parameters that a model brings itself, rotary tables for one, are traced into: what they ask of a hidden
    state is often only its shape, and then their result need not cross a boundary. Where that fails they stay whole.
    """
    opened: set[str] = set()
    try:
        return trace_module(root, inputs, leaf=_leaf(cuts, opened))
    except TraceError:
        if not opened:
            raise
        return trace_module(root, inputs, leaf=_leaf(cuts, None))


def cut_positions(root: nn.Module, graph: fx.Graph, cuts: Sequence[str]) -> list[tuple[int, str]]:
    """Where in the order of the graph's nodes each stage ends, ascending, with the cut's path.

    Raises:
        ScheduleError: a cut module does not run, or nothing runs between two cuts or after the last.
    """
    names = {id(module): name for name, module in root.named_modules()}
    calls = [(index, str(node.target)) for index, node in enumerate(graph.nodes) if node.op == "call_module"]
    found: list[tuple[int, str]] = []
    for path in cuts:
        name = names[id(root.get_submodule(path))]
        runs = [index for index, target in calls if target == name or target.startswith(f"{name}.")]
        if not runs:
            raise ScheduleError("the model does not run this module on the example inputs", path=path, primitive=NAME)
        found.append((runs[-1], path))
    found.sort()
    _check_work_between(calls, found)
    return found


def _leaf(cuts: Sequence[str], opened: set[str] | None) -> Callable[[str, nn.Module], bool]:
    """Which modules stay whole; paths of the tables that do not go to ``opened``, and without it they do."""
    parents = {".".join(path.split(".")[:depth]) for path in cuts for depth in range(1, path.count(".") + 1)}
    ends = set(cuts) - parents

    def leaf(path: str, module: nn.Module) -> bool:
        if path in parents:
            return False
        if path in ends or opened is None or not _is_table(module):
            return True
        opened.add(path)
        return False

    return leaf


def _is_table(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.nn.") and next(module.parameters(), None) is None


def _check_work_between(calls: Sequence[tuple[int, str]], cuts: Sequence[tuple[int, str]]) -> None:
    begins = [-1, *(position for position, _ in cuts)]
    ends = [*(position for position, _ in cuts), float("inf")]
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if not any(begin < index <= end for index, _ in calls):
            where = cuts[number - 1][1]
            what = "nothing runs after it" if number == len(cuts) else f"nothing runs between it and {cuts[number][1]!r}"
            raise ScheduleError(f"{what}; remove this cut", path=where, primitive=NAME)
