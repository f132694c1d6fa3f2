"""``trace``: replace a module by the graph of its forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slapo_core import Primitive, Schedule, ScheduleError

from ..tracers.selection import Leaves, check_traceable, is_container, named_leaves, put_in_place, trace_in_place


class TracePrimitive(Primitive):
    """Replace a module by a traced one, whose graph ``find`` searches and ``replace`` edits. Parameter names stay.

    In a list or dict of modules, each member is traced.

    Rewrite:
        Module(forward)  -->  TracedModule(graph of forward), the modules inside likewise

    Args:
        recursive: Trace the modules inside too, each into a graph of its own, except those of ``torch.nn``.
        flatten: Trace everything into one graph instead.
        leaf_modules: Classes, class names or globs of paths below, to be kept whole.
        tracer: ``"value"``, ``"fx"`` (or ``"pytorch"``, or a subclass of ``torch.fx.Tracer``) or ``"export"``; default:
            ``"value"`` with example inputs, else ``"fx"``.
        example_inputs: Arguments of this module; default: its arguments when the model runs on the schedule's example inputs.
            Those of the whole model become the schedule's, if it had none.
        concrete_args: Non-tensor arguments that become part of the graph, by name.

    Raises:
        TraceError: the forward cannot be a graph; names its source line.
        ScheduleError: a leaf matches nothing below, or a tracer that needs example inputs has none.
    """

    name = "trace"

    @staticmethod
    def check(
        schedule: Schedule,
        recursive: bool = True,
        flatten: bool = False,
        leaf_modules: Leaves = None,
        tracer: Any = None,
        example_inputs: Any = None,
        concrete_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Refuse errors that are visible without running the model."""
        check_traceable(schedule.mod, tracer)
        named_leaves(schedule.mod, leaf_modules, schedule.path)
        if is_container(schedule.mod) and example_inputs is not None:
            what = f"the {type(schedule.mod).__name__} is not called; its members are"
            raise ScheduleError(f"{what}: give them their example_inputs", path=schedule.path, primitive="trace")

    @staticmethod
    def apply(
        schedule: Schedule,
        recursive: bool = True,
        flatten: bool = False,
        leaf_modules: Leaves = None,
        tracer: Any = None,
        example_inputs: Any = None,
        concrete_args: Mapping[str, Any] | None = None,
    ) -> None:
        options = {"recursive": recursive, "flatten": flatten, "leaf_modules": leaf_modules, "tracer": tracer}
        options["concrete_args"] = concrete_args
        if is_container(schedule.mod):
            for name, _ in list(schedule.mod.named_children()):
                schedule[name].apply("trace", **options)
            return
        put_in_place(schedule, trace_in_place(schedule, example_inputs, **options))
