"""The first thing that the fork server imports: from now on the signals that the launcher held back end it without a word."""

from __future__ import annotations

import signal
import sys
from types import TracebackType

from .signals import TERMINATION_SIGNALS


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A launcher that was interrupted takes away what the rank under way was to start with: nothing that users need see."""
    if not issubclass(kind, (FileNotFoundError, EOFError)):
        sys.__excepthook__(kind, error, trace)


signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINATION_SIGNALS)
sys.excepthook = _excepthook
