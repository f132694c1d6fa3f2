"""Handling of termination signals. Imports nothing heavy, so that signals are handled while the rest is imported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATION_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
"""Signals by which a user or a batch system ends a run."""

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def signal_handler(handler: Handler) -> Iterator[None]:
    """Handle termination signals in the block by ``handler``; an ignored one, as under ``nohup``, stays ignored.

    It has no effect in a rank, which also imports the main module: the launcher ends ranks and reports it.
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
    """Exit at once: a handler for times without anything to clean up, when an exception could be swallowed."""
    os.write(2, f"slapo: interrupted by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)
