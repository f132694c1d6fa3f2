"""Tracing of a schedule's module, and its replacement by the traced one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from .fx_tracer import tracer_class
from .selection import trace

if TYPE_CHECKING:
    from slapo_core import Schedule


def trace_in_place(schedule: Schedule, example_inputs: Any, **options: Any) -> Any:
    """Trace the schedule's module on its own inputs; None uses its arguments when the model runs on the schedule's inputs.

    The first inputs for the whole model become the schedule's example inputs.
    """
    if not schedule.path and schedule.example_inputs is None and example_inputs is not None:
        schedule.example_inputs = example_inputs
    if example_inputs is not None or tracer_class(options.get("tracer")) is not None and schedule.path:
        return trace(schedule.mod, example_inputs=example_inputs, **options)
    return trace(schedule.root_module, example_inputs=schedule.example_inputs, target=schedule.path, **options)


def put_in_place(schedule: Schedule, traced: nn.Module) -> None:
    """Put a traced module in the schedule's place, and carry over the metadata of each module."""
    before = dict(schedule.mod.named_modules())
    schedule.replace_module(traced)
    for path, module in traced.named_modules():
        if path in before:
            schedule.share_metadata(before[path], module)
