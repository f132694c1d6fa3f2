"""Failure injection: a call that the primitive's own code makes raises an error."""

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


def folder_of(function: Callable[..., Any]) -> str:
    """Return the folder of the file that defines a function."""
    return os.path.dirname(os.path.abspath(function.__code__.co_filename))
