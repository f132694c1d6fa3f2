"""``sch.checkpoint(budget=...)``: choice of the outputs to keep within a number of bytes per module."""

from __future__ import annotations

import re
from typing import Any

from slapo_core import Schedule, ScheduleError, SlapoError, failure_reason

from ..forward_state._torch_private import is_about_fake_tensors
from .operator_costs import CallCost, measure_calls, select_operators
from .policies import CallPolicy

_UNITS = {"B": 1} | {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)} | {"kB": 1000}
# mixed case such as Mb means bits and is refused
_UNITS |= {change(unit): size for unit, size in _UNITS.items() for change in (str.upper, str.lower)}
_SIZE_PATTERN = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")


def parse_budget(budget: Any) -> int | float:
    """Return bytes as an int, or a share as a float; raise ``ValueError`` for anything else."""
    if isinstance(budget, str) and (match := _SIZE_PATTERN.fullmatch(budget)):
        return int(float(match[1]) * _UNITS[match[2]])
    if isinstance(budget, float) and 0 <= budget <= 1:
        return budget
    if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0:
        return budget
    advice = "give bytes as 2147483648 or '2GiB', or a share from 0.0 to 1.0 of what can be kept"
    raise ValueError(f"budget is {budget!r}; {advice}")


def call_policies(schedule: Schedule, chosen: list[Schedule], budget: int | float) -> list[CallPolicy]:
    """Return the policy of each of the chosen modules.

    Raises:
        ScheduleError: no example inputs, a model that does not run on fake tensors, a module that it does not call with
            gradients, weights that are DTensors, or a module whose inputs exceed the budget.
    """
    if schedule.example_inputs is None:
        what = "a budget is solved over a run of the model; give create_schedule example_inputs"
        raise ScheduleError(what, path=schedule.path, primitive="checkpoint")
    tensors = [*schedule.root_module.named_parameters(), *schedule.root_module.named_buffers()]
    if (spread := next((path for path, tensor in tensors if hasattr(tensor, "to_local")), None)) is not None:
        what = f"{spread!r} is a DTensor, and a budget is solved over a run on plain tensors"
        advice = "call checkpoint(budget=...) before the model is parallelized, or give a policy"
        raise ScheduleError(f"{what}; {advice}", path=schedule.path, primitive="checkpoint")
    try:
        calls = measure_calls(schedule.root_module, [each.mod for each in chosen], schedule.example_inputs)
    except SlapoError:
        raise
    except Exception as err:  # the model's code and fake tensors may raise anything
        is_fake = is_about_fake_tensors(err)
        what = "the model does not run on fake tensors" if is_fake else "the model does not run on the example inputs"
        advice = "give a policy" if is_fake else "give create_schedule such as it takes, or a policy"
        what = f"{what}, so a budget cannot be solved: {failure_reason(err)}; {advice}"
        raise ScheduleError(what, path=schedule.path, primitive="checkpoint") from err
    return [_call_policy(each, call, budget) for each, call in zip(chosen, calls, strict=True)]


def _call_policy(schedule: Schedule, call: CallCost | None, budget: int | float) -> CallPolicy:
    if call is None:
        what = "the model does not call it with gradients on the example inputs, so what it keeps is not known; give a policy"
        raise ScheduleError(what, path=schedule.path, primitive="checkpoint")
    if isinstance(budget, float):
        budget = call.inputs + int(budget * max(call.saved - call.inputs, 0))
    if call.inputs > budget:
        what = f"a budget of {budget} bytes is less than the inputs, {call.inputs} bytes, which a checkpoint always keeps"
        raise ScheduleError(f"{what}; give more", path=schedule.path, primitive="checkpoint")
    calls: dict[str, set[int]] = {}
    for operator in select_operators(call.operators, budget - call.inputs):
        calls.setdefault(operator.name, set()).add(operator.index)
    return CallPolicy({name: frozenset(indices) for name, indices in calls.items()})
