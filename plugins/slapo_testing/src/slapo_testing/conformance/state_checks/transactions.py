"""Checks that a failed or undone step leaves the model as it was; a step fails where a call that its own code makes raises."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from slapo_core import Schedule, SlapoError, Transaction, hookimpl

from ..examples.case import Case, ConformanceError
from ..examples.model_snapshot import Snapshot, first_difference, structure

INJECTIONS = 6
"""Number of places at which a step is made to fail."""


def check_rollback(case: Case) -> None:
    """Check that a step that fails at any place leaves the model as it was, and can be taken afterwards."""
    case.step(case.begin())  # what is imported or kept by the process now is not in the way of counting
    schedule = case.begin()
    unchanged = case.check_unchanged(schedule, "after an error of slapo_after_apply")
    with _observer_that_raises(case), unchanged, suppress(_ObserverError):
        case.step(schedule)
        raise ConformanceError("the step hides the error of a hook")
    if case.example.ranks == 1:
        _fails_in_the_middle(case, schedule)
    case.step(schedule)
    wanted, found = structure(case.make_schedule()), structure(case.finish(schedule))
    if wanted != found:
        raise ConformanceError(f"the step taken after failed ones gives another result: {first_difference(wanted, found)}")


def _fails_in_the_middle(case: Case, schedule: Schedule) -> None:
    folder = os.path.dirname(os.path.abspath(case.primitive.apply.__code__.co_filename))
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
                other = f"does another thing: {first_difference(wanted, found)}"
                raise ConformanceError(f"the step hides that {calls.failed} failed, and {other}")


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


def check_undo(case: Case) -> None:
    """Check that ``undo`` leaves the model as it was."""
    schedule = case.begin()
    with case.check_unchanged(schedule, "after undo()"):
        case.step(schedule)
        schedule.undo()


_UNDO_REGISTRATIONS = (Schedule.on_undo, Schedule.touch, Transaction.on_undo, Transaction.touch)
_EXIT_REGISTRATIONS: tuple[Callable[..., Any], ...] = (ExitStack.callback, ExitStack.push, ExitStack.enter_context)
_BOOKKEEPING = {function.__code__ for function in (*_UNDO_REGISTRATIONS, *_EXIT_REGISTRATIONS)}
"""Calls that register an undo or exit action. These cannot fail between a change and its registration."""
_RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of functions that are called again to resume or end."""
_WEAK_REFERENCE_FILES = {weakref.WeakKeyDictionary.__init__.__code__.co_filename, weakref.WeakSet.__init__.__code__.co_filename}
"""Files of weak reference callbacks, which run wherever an object dies, and whose errors are dropped."""
_EXCLUDED_NAMES = {"<module>", "__exit__", "__del__", "__init_subclass__", "__set_name__"}


class InjectedError(Exception):
    """Error that the call raises."""


class CallCounter:
    """Counter of Python functions called by code of one folder, which makes one of the calls fail.

    Args:
        folder: Folder of the primitive's code.
        fail_at: Number of the call that raises, from 1; 0: none.
    """

    def __init__(self, folder: str, fail_at: int = 0) -> None:
        self._prefix, self._fail_at = os.path.join(folder, ""), fail_at
        self.count = 0
        self.failed = ""

    @contextmanager
    def count_calls(self) -> Iterator[CallCounter]:
        """Count the calls of this thread in a ``with`` block, in place of a debugger."""
        before, logging.raiseExceptions = (sys.gettrace(), logging.raiseExceptions), False  # it would print what it swallows
        sys.settrace(self._trace_call)
        try:
            yield self
        finally:
            sys.settrace(before[0])
            logging.raiseExceptions = before[1]

    def _trace_call(self, frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or not caller.f_code.co_filename.startswith(self._prefix):
            return
        code = frame.f_code
        if (
            code.co_flags & _RESUMABLE
            or code in _BOOKKEEPING
            or code.co_name in _EXCLUDED_NAMES
            or caller.f_code.co_name in _EXCLUDED_NAMES
            or code.co_filename == __file__
            or code.co_filename in _WEAK_REFERENCE_FILES
        ):
            return
        self.count += 1
        if self.count == self._fail_at:
            self.failed = f"{code.co_name}() called at {os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
            raise InjectedError(self.failed)


def evenly_spaced(count: int, most: int) -> list[int]:
    """Return at most ``most`` evenly spaced numbers from 1 to ``count``, including the last."""
    return sorted({max(1, round(count * part / most)) for part in range(1, most + 1)}) if count else []
