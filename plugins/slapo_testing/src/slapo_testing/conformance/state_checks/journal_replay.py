"""Check of the journal: steps are saved and replayed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from slapo_core import Schedule, ScheduleError, load_schedule

from ..examples.case import Case, ConformanceError, check_sentence
from ..examples.model_snapshot import copy_containers, first_difference, is_unchanged, structure


def journal(case: Case) -> None:
    """Check that replaying the saved steps on a new model gives the same model, and that nothing changes the journal."""
    schedule = case.begin()
    before = str(schedule.journal)
    _step_once(case, schedule)
    if not str(schedule.journal).startswith(before):
        raise ConformanceError(f"the step changes the journal's entries of earlier steps, {before!r}")
    case.finish(schedule)
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("json", "py"):
            _round_trip(case, schedule, Path(folder, f"schedule.{kind}"))
    written = str(schedule.journal)
    case.run(schedule.mod)
    if str(schedule.journal) != written:
        raise ConformanceError(f"a run of the model changes the journal from {written!r} to {str(schedule.journal)!r}")


def _step_once(case: Case, schedule: Schedule) -> None:
    """Take the step; it must be one step of the journal and leave its arguments unchanged."""
    steps = len(schedule.journal)
    given = case.arguments(schedule)
    before = copy_containers(given, clone=True)
    case.step(schedule, given=given)
    if len(schedule.journal) != steps + 1:
        raise ConformanceError(f"the call is {len(schedule.journal) - steps} steps of the journal, not one")
    for now, then in zip([*given[0], *given[1].values()], [*before[0], *before[1].values()], strict=True):
        if not is_unchanged(now, then):
            raise ConformanceError(
                f"the step changes its argument {then!r} to {now!r}, which changes the journal's entry as well"
            )


def _round_trip(case: Case, schedule: Schedule, file: Path) -> None:
    try:
        schedule.save(file)
    except ScheduleError as error:
        check_sentence(error, "save()")
        if case.example.writable:
            raise ConformanceError(f"save() refuses the step: {error}") from error
        return
    if not case.example.writable:
        raise ConformanceError("the example says that the step cannot be written down, but save() does")
    again = _replay(case, file)
    if str(again.journal) != str(schedule.journal):
        raise ConformanceError(f"the journal of {file.suffix} reads {again.journal!s}, not {schedule.journal!s}")
    wanted, found = structure(schedule), structure(again)
    if wanted != found:
        raise ConformanceError(f"the model made from {file.suffix} differs: {first_difference(wanted, found)}")
    if "values" not in case.example.changes:  # what an argument draws at random is another one
        case.compare(_all_at_once(case).mod, again.mod, f"the model made from {file.suffix}")


def _replay(case: Case, file: Path) -> Schedule:
    options: dict[str, Any] = {"example_inputs": case.example_inputs(), "plugins": case.registry}
    model = case.model()
    torch.manual_seed(2)
    return load_schedule(model, file, trust=[*case.example.trust], **options)


def _all_at_once(case: Case) -> Schedule:
    """Return the schedule of a model with all steps, with the random draws of a replay."""
    model = case.model()
    torch.manual_seed(2)
    schedule = case.begin(model)
    case.step(schedule, seeded=False)
    return case.finish(schedule)
