"""Signals that end the tuner after it has cleaned up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

TERMINATION_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]


class Interruption:
    """Takes the signals that want the program to end, in a ``with`` block, and notes the first as ``number``.

    A signal raises ``KeyboardInterrupt``, except inside :meth:`deferred`, where it is only noted.

    A signal that is ignored, as under ``nohup``, stays so. Outside of the main thread nothing is noted, as Python handles
    signals there alone.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}
        self._deferred = False

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            numbers = [number for number in TERMINATION_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def defer_signals(self) -> Iterator[None]:
        """Only note signals in a block, which looks at ``number`` itself."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if not self._deferred:
            raise KeyboardInterrupt


def signal_name(number: int) -> str:
    """Return a signal's name, e.g. ``"SIGINT"``."""
    try:
        return signal.Signals(number).name
    except ValueError:  # one of those that have no name of their own
        return f"signal {number}"
