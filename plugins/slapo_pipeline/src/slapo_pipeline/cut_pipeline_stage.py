"""``cut_pipeline_stage``: a pipeline stage ends after this module."""

from __future__ import annotations

from collections.abc import Iterable

from slapo_core.errors import ScheduleError
from slapo_core.journal import Step
from slapo_core.primitive import Primitive
from slapo_core.schedule import Schedule
from slapo_core.wrapping import is_opaque

NAME = "cut_pipeline_stage"


class CutPipelineStagePrimitive(Primitive):
    """End a pipeline stage after this module, at any depth; what runs later belongs to the next stage.

    The model itself is not changed; ``build`` takes it apart there. Cuts may lie in different submodules or inside of each
    other, and n cuts make n + 1 stages. A module that runs several times ends its stage after the last time.

    Rewrite:
        h.4, h.5, h.6  -->  [h.4, h.5] [h.6]        sch["h.5"].cut_pipeline_stage()

    Raises:
        ScheduleError: the whole model, a module cut already, or one inside a module that is wrapped or has hooks.
    """

    name = NAME
    scope = "module"

    @staticmethod
    def check(schedule: Schedule) -> None:
        """Refuse a place where no stage can end."""
        if not schedule.path:
            raise ScheduleError("nothing comes after the whole model; cut after a module inside it", primitive=NAME)
        if schedule.path in cuts(schedule.journal) or NAME in schedule.metadata.primitives:
            raise ScheduleError("a stage ends after this module already", path=schedule.path, primitive=NAME)
        outer = schedule.parent
        while outer is not None:
            if is_opaque(outer.mod):
                raise ScheduleError(
                    f"it lies inside {outer.path or 'the whole model'!r}, which is wrapped or has hooks and runs as one piece; "
                    "cut after that module, or cut before wrapping it",
                    path=schedule.path,
                    primitive=NAME,
                )
            outer = outer.parent

    @staticmethod
    def apply(schedule: Schedule) -> None:
        """Nothing to change: the journal holds the cut."""


def cuts(steps: Iterable[Step]) -> list[str]:
    """Paths of the modules that end a stage, in the order in which they were cut."""
    found: list[str] = []
    for step in steps:
        found += [step.path] if step.name == NAME else cuts(step.children)
    return found
