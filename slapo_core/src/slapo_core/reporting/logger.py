"""The logger of Slapo and its plugins."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import torch.distributed as dist


class RankFormatter(logging.Formatter):
    """Formatter that prefixes messages with the global rank once ``torch.distributed`` is initialised."""

    def format(self, record: logging.LogRecord) -> str:
        record.rank = f"[rank {dist.get_rank()}] " if dist.is_available() and dist.is_initialized() else ""
        return super().format(record)


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to the current ``sys.stderr``, which notebooks and tests replace.

    Records with a true attribute ``another_rank`` are skipped, since another rank writes the same record.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "another_rank", False):
            self.stream = sys.stderr
            super().emit(record)


def get_logger(name: str = "Slapo", level: int = logging.INFO) -> logging.Logger:
    """Return the named logger, with one handler that writes to stderr. The root logger is not changed.

    Args:
        name: Name of the logger.
        level: Lowest level to show from now on. The default, ``INFO``, does not override a level that was set before, since all
            of Slapo calls this function.

    Example:
        >>> get_logger("Slapo.example", logging.WARNING).isEnabledFor(logging.INFO)
        False
    """
    logger = logging.getLogger(name)
    if level != logging.INFO or logger.level == logging.NOTSET:
        logger.setLevel(level)
    if not any(isinstance(handler, ConsoleHandler) for handler in logger.handlers):
        handler = ConsoleHandler(sys.stderr)
        handler.setFormatter(RankFormatter("%(levelname)s %(name)s: %(rank)s%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False  # the root logger's handlers would print every line a second time
    return logger
