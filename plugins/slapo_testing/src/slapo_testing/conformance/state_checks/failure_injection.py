"""Failures in the middle of a step: a call that the primitive's own code makes raises instead."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from slapo_core import Schedule, Transaction

_UNDOES = (Schedule.on_undo, Schedule.touch, Transaction.on_undo, Transaction.touch)
_ENDS: tuple[Callable[..., Any], ...] = (ExitStack.callback, ExitStack.push, ExitStack.enter_context)
_BOOKKEEPING = {function.__code__ for function in (*_UNDOES, *_ENDS)}
"""By these a primitive tells how to undo what it did, or to end what it began: between the two nothing else can fail."""
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""What is called again to go on, or to end."""
_WEAK = {weakref.WeakKeyDictionary.__init__.__code__.co_filename, weakref.WeakSet.__init__.__code__.co_filename}
"""Their callbacks run wherever an object happens to die, and what they raise goes nowhere."""
_NEVER = {"<module>", "__exit__", "__del__", "__init_subclass__", "__set_name__"}


class InjectedError(Exception):
    """What the call raises."""


class Calls:
    """Counts the Python functions that code of one folder calls, and lets one of the calls fail.

    Args:
        folder: Where the primitive's code is.
        fail_at: Number of the call that raises, from 1; 0: none.
    """

    def __init__(self, folder: str, fail_at: int = 0) -> None:
        self._prefix, self._fail_at = os.path.join(folder, ""), fail_at
        self.count = 0
        self.failed = ""

    @contextmanager
    def watching(self) -> Iterator[Calls]:
        """Watch the calls of this thread, in place of a debugger."""
        before, logging.raiseExceptions = (sys.gettrace(), logging.raiseExceptions), False  # it would print what it swallows
        sys.settrace(self._called)
        try:
            yield self
        finally:
            sys.settrace(before[0])
            logging.raiseExceptions = before[1]

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or not caller.f_code.co_filename.startswith(self._prefix):
            return
        code = frame.f_code
        if (
            code.co_flags & _RESUMED
            or code in _BOOKKEEPING
            or code.co_name in _NEVER
            or caller.f_code.co_name in _NEVER
            or code.co_filename == __file__
            or code.co_filename in _WEAK
        ):
            return
        self.count += 1
        if self.count == self._fail_at:
            self.failed = f"{code.co_name}() called at {os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
            raise InjectedError(self.failed)


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` numbers from 1 to ``count``, evenly, the last one among them."""
    return sorted({max(1, round(count * part / most)) for part in range(1, most + 1)}) if count else []


def folder_of(function: Callable[..., Any]) -> str:
    """The folder of the file that defines a function."""
    return os.path.dirname(os.path.abspath(function.__code__.co_filename))
