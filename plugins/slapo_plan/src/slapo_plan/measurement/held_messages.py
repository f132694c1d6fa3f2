"""Slapo's log messages, kept while a schedule is tried."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from slapo_core import get_logger


@contextmanager
def held_messages() -> Iterator[list[str]]:
    """Keep Slapo's messages from the log in a block; yield its warnings."""
    found: list[str] = []

    def hold(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            found.append(record.getMessage())
        return False

    logger = get_logger()
    logger.addFilter(hold)
    try:
        yield found
    finally:
        logger.removeFilter(hold)
