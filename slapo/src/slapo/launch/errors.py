"""Errors of a run that was started. Imports nothing heavy."""

from __future__ import annotations

import signal

from slapo_core import SlapoError


class RankError(SlapoError):
    """A rank failed; all ranks have ended.

    Args:
        message: One sentence that names the rank.
        traceback: Traceback of an unexpected error; empty for an error with a message of its own.
    """

    exit_code = 1

    def __init__(self, message: str, traceback: str = "") -> None:
        self.traceback = traceback
        super().__init__(message)


class InterruptedRunError(SlapoError):
    """A signal ended the run; all ranks have ended. The exit code is the one shells use for that signal."""

    traceback = ""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"interrupted by {signal.Signals(number).name}; all ranks have ended")
