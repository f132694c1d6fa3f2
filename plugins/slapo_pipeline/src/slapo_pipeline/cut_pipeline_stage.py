"""``cut_pipeline_stage``: a pipeline stage ends after this module, or begins with it."""

from __future__ import annotations

from functools import partial
from typing import Any

from slapo_core import Primitive, Schedule, ScheduleError

from .tracing.cuts import CUT_PIPELINE_STAGE, Where, cut_position, cuts
from .tracing.root_hooks import is_indivisible

_MEANINGS = {"after": "a stage ends after this module", "before": "a stage begins with this module"}


class CutPipelineStagePrimitive(Primitive):
    """End a pipeline stage after this module, or begin one with it, at any depth; what runs later belongs to the next stage.

    The model itself is not changed; ``build`` takes it apart there. Cuts may lie in different submodules or inside of each
    other, and n cuts make n + 1 stages. A module that runs several times ends its stage after the last time, and begins one
    with the first. What runs between two modules, an addition say, goes with the one that a cut does not separate it from.
    Hooks of the whole model move: forward-pre and backward hooks to the first stage, forward hooks to the last.

    The paths of all cuts stand in ``sch.metadata.primitives["cut_pipeline_stage"]`` of the top schedule, in their order.

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
                f"where is {where!r}; it is 'after' or 'before'", path=schedule.path, primitive=CUT_PIPELINE_STAGE
            )
        if not schedule.path:
            beyond = "nothing comes after" if where == "after" else "a stage begins with"
            raise ScheduleError(f"{beyond} the whole model; cut {where} a module inside it", primitive=CUT_PIPELINE_STAGE)
        known = (cut_position(cut) for cut in cuts(schedule.journal) if cut == schedule.path)
        if where in (*known, *schedule.metadata.primitives.get(CUT_PIPELINE_STAGE, ())):
            raise ScheduleError(f"{_MEANINGS[where]} already", path=schedule.path, primitive=CUT_PIPELINE_STAGE)
        refuse_inside_opaque(schedule, CUT_PIPELINE_STAGE)

    @staticmethod
    def apply(schedule: Schedule, where: Where = "after") -> None:
        """Nothing to change: the journal holds the cut, and the top schedule's metadata its path."""
        schedule.metadata.primitives[CUT_PIPELINE_STAGE].add(where)
        known = schedule.get_top_schedule().metadata.primitives
        before = known.get(CUT_PIPELINE_STAGE)
        schedule.on_undo(partial(_put_back, known, before))
        known[CUT_PIPELINE_STAGE] = [*(before or ()), schedule.path]

    @staticmethod
    def init_metadata() -> set[str]:
        """Return the places where this module is cut."""
        return set()


def _put_back(known: dict[str, Any], before: list[str] | None) -> None:
    if before is None:
        known.pop(CUT_PIPELINE_STAGE, None)
    else:
        known[CUT_PIPELINE_STAGE] = before


def refuse_inside_opaque(schedule: Schedule, primitive: str) -> None:
    """Raise ``ScheduleError`` for a module inside one that cannot be taken apart."""
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
