"""Messages of an attempt, logged if it succeeds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from slapo_core import get_logger


@contextmanager
def messages_of_success() -> Iterator[None]:
    """Log the messages of a block only if it succeeds."""
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        held.append(record)
        return False

    logger = get_logger()
    logger.addFilter(hold)
    try:
        yield
    finally:
        logger.removeFilter(hold)
    for record in held:
        logger.handle(record)
