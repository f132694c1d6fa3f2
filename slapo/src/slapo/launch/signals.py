"""Signals that end the program, in one line. Imports nothing heavy, so that they are handled while the rest is imported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATION_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
"""The signals of a user or a batch system that wants the run to end."""

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def signal_handler(handler: Handler) -> Iterator[None]:
    """Let ``handler`` take the ending signals in a block; one that is ignored, as under ``nohup``, stays so.

    Not in a rank, which imports the main module too: its launcher ends it, and says so.
    """
    main = threading.current_thread() is threading.main_thread() and multiprocessing.parent_process() is None
    numbers = [number for number in TERMINATION_SIGNALS if main and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def exit_immediately(number: int, frame: FrameType | None) -> None:
    """A handler for while there is nothing to clean up, and code under way that may swallow an exception."""
    os.write(2, f"slapo: interrupted by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)
