"""Parts that a model's published plan leaves out, as the vision part of one for images and text: split by derived plans."""

from __future__ import annotations

from slapo_core import Schedule, ScheduleError, TraceError, is_sharded

from ..splitting import attention_heads
from ..splitting.module_paths import without_block_numbers
from .derivation.replicated_modules import tell_whole_attentions
from .derived_plan import apply_derived

_UNPLANNED = "the plan that is published with the model leaves it out"


def split_unplanned(schedule: Schedule) -> None:
    """Split each part with attention of which the published plan splits nothing, and warn of what stays whole.

    Args:
        schedule: Of the model, after the steps of its published plan.
    """
    reasons = dict[str, str]()
    if schedule.example_inputs is not None:
        for path in _unplanned(schedule):
            try:
                apply_derived(schedule[path])
            except (ScheduleError, TraceError) as err:
                reasons[f"{path}."] = f"{_UNPLANNED}, and none can be derived: {err}"
    tell_whole_attentions(schedule, reasons, _UNPLANNED)


def _unplanned(schedule: Schedule) -> list[str]:
    """Return the outermost modules, none of them repeated, that have attention and nothing that is split."""
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
