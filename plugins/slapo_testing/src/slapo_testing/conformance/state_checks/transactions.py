"""Checks that a failed or undone step leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from slapo_core import Schedule, SlapoError, hookimpl

from ..examples.case import Case, ConformanceError
from ..examples.model_snapshot import Snapshot
from ..examples.model_structure import first_difference, structure
from .failure_injection import CallCounter, evenly_spaced, folder_of

INJECTIONS = 6
"""Number of places at which a step is made to fail."""


def check_rollback(case: Case) -> None:
    """Check that a step that fails at any place leaves the model as it was, and can be taken afterwards."""
    case.step(case.begin())  # what is imported or kept by the process now is not in the way of counting
    schedule = case.begin()
    with _observer_that_raises(case), case.check_unchanged(schedule, "after an error of slapo_after_apply"):
        _expect_error(partial(case.step, schedule))
    if case.example.ranks == 1:
        _fails_in_the_middle(case, schedule)
    case.step(schedule)
    wanted, found = structure(case.make_schedule()), structure(case.finish(schedule))
    if wanted != found:
        raise ConformanceError(f"the step taken after failed ones is another one: {first_difference(wanted, found)}")


def _fails_in_the_middle(case: Case, schedule: Schedule) -> None:
    folder = folder_of(case.primitive.apply)
    calls = CallCounter(folder)
    with calls.count_calls():
        case.step(schedule)
    wanted = structure(schedule)
    schedule.undo()
    for number in evenly_spaced(calls.count, INJECTIONS):
        calls, before = CallCounter(folder, number), Snapshot(schedule)
        try:
            with calls.count_calls():
                case.step(schedule)
        except Exception as error:
            changed = before.differences(Snapshot(schedule))
            if changed or not calls.failed:
                raise ConformanceError(f"after {calls.failed or repr(error)} failed, {'; '.join(changed[:3])}") from error
        else:
            found = structure(schedule)
            schedule.undo()
            # it may have another way to the same, or have made fewer calls this time
            if calls.failed and found != wanted and not case.example.tries:
                raise ConformanceError(
                    f"the step hides that {calls.failed} failed, and does another thing: {first_difference(wanted, found)}"
                )


class _ObserverError(SlapoError):
    """Error that a hook raises."""


@contextmanager
def _observer_that_raises(case: Case) -> Iterator[None]:
    class Observer:
        @hookimpl
        def slapo_after_apply(self, schedule: Schedule) -> None:
            raise _ObserverError("slapo_after_apply")

    observer, manager = Observer(), case.registry._plugins.manager
    manager.register(observer)
    try:
        yield
    finally:
        manager.unregister(observer)


def _expect_error(action: Callable[[], Any]) -> None:
    try:
        action()
    except _ObserverError:
        return
    raise ConformanceError("the step hides the error of a hook")


def check_undo(case: Case) -> None:
    """Check that ``undo`` leaves the model as it was."""
    schedule = case.begin()
    with case.check_unchanged(schedule, "after undo()"):
        case.step(schedule)
        schedule.undo()
