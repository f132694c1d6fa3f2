"""``trace``: a module becomes the graph of what its forward does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import ScheduleError
from ..primitive import Primitive
from ..tracing import trace
from ..tracing.tracers import check_traceable, named_leaves

if TYPE_CHECKING:
    from ..schedule import Schedule


class TracePrimitive(Primitive):
    """Replace a module by a traced one, whose graph ``find`` searches and ``replace`` edits. Parameter names stay.

    Rewrite:
        Module(forward)  -->  TracedModule(graph of forward), the modules inside likewise

    Args:
        recursive: Trace the modules inside too, each into a graph of its own, but those of ``torch.nn``.
        flatten: One graph of everything instead.
        leaf_modules: Classes, class names or globs of paths below, to be kept whole.
        tracer: ``"value"`` (default), ``"fx"`` or ``"export"``.
        example_inputs: This module's arguments: as for ``create_schedule``; default: what it gets when the
            model runs on the schedule's example inputs.
        concrete_args: Further arguments, no tensors.

    Raises:
        TraceError: the forward cannot be a graph; names its source line.
        ScheduleError: no example inputs, or a leaf that is nowhere below.
    """

    name = "trace"

    @staticmethod
    def check(
        schedule: Schedule,
        recursive: bool = True,
        flatten: bool = False,
        leaf_modules: Iterable[str | type] | None = None,
        tracer: str = "value",
        example_inputs: Any = None,
        concrete_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Refuse what can be seen without running the model."""
        check_traceable(schedule.mod, tracer)
        named_leaves(schedule.mod, leaf_modules or ())
        if example_inputs is None and schedule.example_inputs is None:
            raise ScheduleError(
                "tracing runs the model once; give example_inputs, here or to create_schedule",
                path=schedule.path,
                primitive="trace",
            )

    @staticmethod
    def apply(
        schedule: Schedule,
        recursive: bool = True,
        flatten: bool = False,
        leaf_modules: Iterable[str | type] | None = None,
        tracer: str = "value",
        example_inputs: Any = None,
        concrete_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Trace, and put the traced module in the place."""
        traced = trace_in_place(
            schedule,
            example_inputs,
            recursive=recursive,
            flatten=flatten,
            leaf_modules=leaf_modules,
            tracer=tracer,
            concrete_args=concrete_args,
        )
        install(schedule, traced)


def trace_in_place(schedule: Schedule, example_inputs: Any, **options: Any) -> Any:
    """Trace the schedule's module on its own inputs; None: on what it gets when the model runs on the schedule's."""
    if example_inputs is not None:
        return trace(schedule.mod, example_inputs=example_inputs, **options)
    return trace(schedule.root_module, example_inputs=schedule.example_inputs, target=schedule.path, **options)


def install(schedule: Schedule, traced: nn.Module) -> None:
    """Put a traced module in the schedule's place; what the schedule knows of each module stays known."""
    before, known = dict(schedule.mod.named_modules()), schedule._root.metadata
    schedule.replace_module(traced)
    for path, module in traced.named_modules():
        if path in before and before[path] in known:
            known[module] = known[before[path]]
