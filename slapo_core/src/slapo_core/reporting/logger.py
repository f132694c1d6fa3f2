"""The logger of Slapo and its plugins."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import torch.distributed as dist


class RankFormatter(logging.Formatter):
    """Puts the global rank in front of the message once ``torch.distributed`` is initialised."""

    def format(self, record: logging.LogRecord) -> str:
        record.rank = f"[rank {dist.get_rank()}] " if dist.is_available() and dist.is_initialized() else ""
        return super().format(record)


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever ``sys.stderr`` is at that moment: notebooks and tests put another stream there.

    A record with a true attribute ``another_rank`` is left to another rank, which writes the same.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "another_rank", False):
            self.stream = sys.stderr
            super().emit(record)


def get_logger(name: str = "Slapo", level: int = logging.INFO) -> logging.Logger:
    """The named logger, with one handler of its own that writes to stderr; the root logger is left alone.

    Args:
        name: Name of the logger.
        level: The lowest level that is shown from now on. The default, 20, is ``INFO``, and leaves a level alone that was set
            before: all of Slapo asks for its logger again and again.
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
