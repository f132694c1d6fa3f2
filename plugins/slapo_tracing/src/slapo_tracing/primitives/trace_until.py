"""``trace_until``: trace a module into one graph, down to the named modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from slapo_core import Primitive, Schedule, ScheduleError, TraceError
from slapo_core import paths as module_paths

from ..tracers.selection import leaf_list, put_in_place, trace_in_place
from .trace import TracePrimitive


class TraceUntilPrimitive(Primitive):
    """Trace this module into one graph down to the named modules.

    These stay whole, and so do modules that do not contain any.

    Rewrite:
        Model(transformer(h.0, h.1))  -->  TracedModule: ... transformer.h.0(...), transformer.h.1(...) ...

    Args:
        paths: Path or glob below this module, or several. A list of modules stands for its members. ``""`` stands for this
            module: its own forward, in which all modules stay whole.
        **kwargs: ``tracer``, ``leaf_modules``, ``example_inputs``, ``concrete_args`` of ``trace``.

    Raises:
        ScheduleError: a path matches no module.
        TraceError: the forward cannot be a graph, or does not call a named module.
    """

    name = "trace_until"

    @staticmethod
    def check(schedule: Schedule, paths: str | list[str], **kwargs: Any) -> None:
        """Refuse errors that are visible without running the model."""
        _modules_at(schedule, paths)
        if unknown := kwargs.keys() - {"tracer", "leaf_modules", "example_inputs", "concrete_args"}:
            raise ScheduleError(f"takes no {min(unknown)!r}; see its help", path=schedule.path, primitive="trace_until")
        TracePrimitive.check(schedule, **kwargs)

    @staticmethod
    def apply(schedule: Schedule, paths: str | list[str], **kwargs: Any) -> None:
        named = _modules_at(schedule, paths)
        parents = {"", *(".".join(path.split(".")[:depth]) for path in named for depth in range(path.count(".") + 1))}
        whole = [path for path, _ in schedule.mod.named_modules() if path not in parents]
        whole += [path for path in named if path in parents]
        leaves = [*whole, *leaf_list(kwargs.pop("leaf_modules", None))]
        traced = trace_in_place(schedule, kwargs.pop("example_inputs", None), flatten=True, leaf_modules=leaves, **kwargs)
        called = {str(node.target) for node in traced.graph.find_nodes(op="call_module")}
        modules = {traced.get_submodule(name) for name in called}
        missing = [path for path, module in named.items() if path not in called and module not in modules]
        if missing and kwargs.get("tracer") != "export":
            raise TraceError(f"the forward does not call {missing[0]!r} on the example inputs; trace until another module")
        put_in_place(schedule, traced)


def _modules_at(schedule: Schedule, paths: str | list[str]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    given = [paths] if isinstance(paths, str) else paths
    if not isinstance(given, Iterable) or not all(isinstance(pattern, str) for pattern in given):
        raise ScheduleError(f"paths is {paths!r:.60}; give one, or a list", path=schedule.path, primitive="trace_until")
    for pattern in given:
        matches = dict(module_paths.select(schedule.mod, pattern)) if pattern else {}
        if pattern and not matches:
            raise ScheduleError(f"no module at {pattern!r}; give one below", path=schedule.path, primitive="trace_until")
        for path, module in matches.items():
            is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
            inside = {module_paths.join(path, name): child for name, child in module.named_children()} if is_list else {}
            found.update(inside or {path: module})
    return found
