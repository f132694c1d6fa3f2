"""A checkpoint that is written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Saving:
    """What ``save`` gives; the checkpoint is complete when ``wait`` returns.

    Args:
        write: Writes it, and raises the same error on all ranks if one of them cannot.
        waits: Whether to write it here and now.
    """

    def __init__(self, write: Callable[[], None], waits: bool) -> None:
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if waits:
            write()
            return
        self._write = write
        self._thread = threading.Thread(target=self._run, name="slapo-save")
        self._thread.start()

    def done(self) -> bool:
        """Whether it is written, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when it is written.

        Raises:
            Exception: what kept it from being written; once.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            self._write()
        except Exception as err:
            self._error = err
        del self._write  # it holds what was written
