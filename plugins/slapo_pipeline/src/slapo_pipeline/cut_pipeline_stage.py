"""``cut_pipeline_stage``: a pipeline stage ends after this module, or begins with it."""

from __future__ import annotations

from functools import partial
from typing import Any

from slapo_core import Primitive, Schedule, ScheduleError

from .tracing.cuts import CUT_PIPELINE_STAGE, Where, cut_where, cuts_of_steps
from .tracing.root_hooks import is_indivisible

_MEANINGS = {"after": "a stage ends after this module", "before": "a stage begins with this module"}


class CutPipelineStagePrimitive(Primitive):
    """End a pipeline stage after this module, or begin one with it, at any depth; what runs later belongs to the next stage.

    The model itself does not change; ``build`` divides it at the cuts. Cuts may lie in different submodules or inside each
    other, and n cuts make n + 1 stages. A module that runs several times ends its stage after its last run, and begins one
    with its first. An operation between two modules, such as an addition, belongs to the stage of the module on its side of
    the cut. Hooks of the whole model move: forward-pre and backward hooks to the first stage, forward hooks to the last.

    ``sch.metadata.primitives["cut_pipeline_stage"]`` of the top schedule lists the paths of all cuts, in their order.

    Rewrite:
        h.4, h.5, h.6  -->  [h.4, h.5] [h.6]        sch["h.5"].cut_pipeline_stage()
        h.4, h.5, h.6  -->  [h.4] [h.5, h.6]        sch["h.5"].cut_pipeline_stage(where="before")

    Args:
        where: ``"after"``, a stage ends after this module, or ``"before"``, a stage begins with it.

    Raises:
        ScheduleError: the whole model, another ``where``, a module cut there already, or one inside a module that is wrapped
            or has hooks.
    """

    name = CUT_PIPELINE_STAGE
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, where: Where = "after") -> None:
        """Refuse a place where no stage can end."""
        if where not in _MEANINGS:
            raise ScheduleError(
                f"where is {where!r}; give 'after' or 'before'", path=schedule.path, primitive=CUT_PIPELINE_STAGE
            )
        if not schedule.path:
            beyond = "nothing comes after" if where == "after" else "a stage begins with"
            raise ScheduleError(f"{beyond} the whole model; cut {where} a module inside it", primitive=CUT_PIPELINE_STAGE)
        known = (cut_where(cut) for cut in cuts_of_steps(schedule.journal) if cut == schedule.path)
        if where in (*known, *schedule.metadata.primitives.get(CUT_PIPELINE_STAGE, ())):
            raise ScheduleError(f"{_MEANINGS[where]} already", path=schedule.path, primitive=CUT_PIPELINE_STAGE)
        refuse_inside_opaque(schedule, CUT_PIPELINE_STAGE)

    @staticmethod
    def apply(schedule: Schedule, where: Where = "after") -> None:
        """Record the cut in the metadata; the model does not change, as the journal holds the cut."""
        schedule.metadata.primitives[CUT_PIPELINE_STAGE].add(where)
        known = schedule.get_top_schedule().metadata.primitives
        before = known.get(CUT_PIPELINE_STAGE)
        schedule.on_undo(partial(_put_back, known, before))
        known[CUT_PIPELINE_STAGE] = [*(before or ()), schedule.path]

    @staticmethod
    def init_metadata() -> set[str]:
        """Return the set of the module's cuts, ``"after"`` and ``"before"``."""
        return set()


def _put_back(known: dict[str, Any], before: list[str] | None) -> None:
    if before is None:
        known.pop(CUT_PIPELINE_STAGE, None)
    else:
        known[CUT_PIPELINE_STAGE] = before


def refuse_inside_opaque(schedule: Schedule, primitive: str) -> None:
    """Raise ``ScheduleError`` if the module lies inside a module that cannot be divided."""
    outer = schedule.parent
    while outer is not None:
        if is_indivisible(schedule.root_module, outer.mod):
            what = f"{outer.path!r}, which is wrapped or has hooks" if outer.path else "'the whole model', which is wrapped"
            raise ScheduleError(
                f"it lies inside {what} and runs as one piece; cut after that module, or cut before wrapping it",
                path=schedule.path,
                primitive=primitive,
            )
        outer = outer.parent
