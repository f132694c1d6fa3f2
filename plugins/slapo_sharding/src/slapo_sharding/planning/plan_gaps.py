"""Submodules that a published plan leaves out, such as the vision part of a model for images and text."""

from __future__ import annotations

from slapo_core import Schedule, ScheduleError, TraceError, is_sharded

from ..splitting import attention_heads
from ..splitting.module_paths import without_block_numbers
from .derivation.replicated_modules import log_replicated_attentions
from .derived_plan import apply_derived_plan

_UNPLANNED = "the published plan of the model leaves it out"


def split_plan_gaps(schedule: Schedule) -> None:
    """Derive a plan for each submodule with attention and no split, and log what stays whole."""
    reasons = dict[str, str]()
    if schedule.example_inputs is not None:
        for path in _attention_modules(schedule):
            try:
                apply_derived_plan(schedule[path])
            except (ScheduleError, TraceError) as err:
                reasons[f"{path}."] = f"{_UNPLANNED}, and none can be derived: {err}"
    log_replicated_attentions(schedule, reasons, _UNPLANNED)


def _attention_modules(schedule: Schedule) -> list[str]:
    """Return the outermost modules with attention and no split. A repeated module is none."""
    found = dict[str, None]()
    for path in attention_heads.replicated_attentions(schedule.mod):
        names = path.split(".")
        for end in range(1, len(names)):
            outer = ".".join(names[:end])
            if without_block_numbers(outer) != outer:
                break
            if not any(map(is_sharded, schedule.mod.get_submodule(outer).parameters())):
                found[outer] = None
                break
    return list(found)
