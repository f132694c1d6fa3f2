"""``cut_at_marks``: stages end at the ``pipe_split()`` marks in the model's own forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from slapo_core import Primitive, Schedule, ScheduleError
from slapo_tracing.tracers import synthetic_inputs

from .cut_pipeline_stage import refuse_inside_opaque
from .tracing.cuts import CUT_AT_MARKS, record_marks
from .tracing.flat_trace import named_batch, trace_flat, unshared_tensors
from .tracing.root_hooks import is_indivisible, without_root_hooks


class CutAtMarksPrimitive(Primitive):
    """End a pipeline stage at each ``pipe_split()`` that the forward of this module, or of a module inside it, reaches.

    Marks are calls of ``slapo.pipeline.pipe_split()``, or of ``torch.distributed.pipelining.pipe_split()``, in the model's own
    code. To find them, the model is traced once on the example inputs. The schedule may also have cuts at modules.

    Rewrite:
        encode(x); pipe_split(); decode(x)  -->  [encode(x)] [decode(x)]        sch.cut_at_marks()

    Args:
        numbers: Only these marks, and only in this module's own forward, counted from 0 in the order in which it reaches
            them, over all its calls in one run of the model. Default: all marks, also of the modules inside.

    Raises:
        ScheduleError: no mark; a mark that is cut already, or lies inside a module that is wrapped or has hooks; no example
            inputs; an invalid number.
        TraceError: the model cannot be traced.
    """

    name = CUT_AT_MARKS
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, *numbers: int) -> list[tuple[str, int]]:
        """Return paths of modules, each with the number of marks that its forward reaches; empty if numbers are given."""
        if not numbers:
            return _marks_below(schedule)
        for number in numbers:
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise _error(schedule, f"{number!r} is not a mark; the first one that this module's forward runs into is 0")
            if number in schedule.metadata.primitives.get(CUT_AT_MARKS, ()) or numbers.count(number) > 1:
                raise _error(schedule, f"a stage ends at mark {number} of this module's forward already")
        if is_indivisible(schedule.root_module, schedule.mod):
            raise _error(schedule, "its forward is wrapped or has hooks and runs as one piece; cut before wrapping it")
        refuse_inside_opaque(schedule, CUT_AT_MARKS)
        return []

    @staticmethod
    def apply(schedule: Schedule, *numbers: int, checked: list[tuple[str, int]]) -> None:
        """Record the marks; the model does not change, as the journal holds the cuts."""
        schedule.metadata.primitives[CUT_AT_MARKS].update(numbers)
        top = schedule.get_top_schedule()
        for path, count in checked:
            (top[path] if path else top).cut_at_marks(*range(count))

    @staticmethod
    def init_metadata() -> set[int]:
        """Return the numbers of the marks of this module's own forward that are cut."""
        return set()


def marks_of_model(root: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """Return per mark the path of the module whose forward has it, in the order in which the model reaches them."""
    with record_marks(root) as marks, without_root_hooks(root):
        trace_flat(root, unshared_tensors(inputs), [])
    return marks


def _marks_below(schedule: Schedule) -> list[tuple[str, int]]:
    path = schedule.path
    root = schedule.root_module
    inputs = synthetic_inputs(root) if schedule.example_inputs is None else named_batch(root, schedule.example_inputs)
    if inputs is None:
        raise _error(schedule, "marks are found by running the model; give create_schedule example_inputs=, one batch")
    marks = marks_of_model(root, inputs)
    inside = [found for found in marks if not path or f"{found}.".startswith(f"{path}.")]
    if not inside:
        raise _error(schedule, "the forward runs into no mark; call slapo.pipeline.pipe_split() in it where a stage is to end")
    return list(Counter(inside).items())


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, path=schedule.path, primitive=CUT_AT_MARKS)
