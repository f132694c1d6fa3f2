"""Warnings that Slapo logs, as a list."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def warnings_told() -> Iterator[list[str]]:
    """Yield the warnings that are logged inside; the handler is removed, because worker processes run other tests."""
    logger, handler = logging.getLogger("Slapo"), _Messages()
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)
