"""What Megatron-Core 0.16 does wrong as it writes a checkpoint, set right for the time of one; a test tells when it has."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def repaired() -> Iterator[None]:
    """A save starts another process to hand results to itself, which costs seconds and fails in a script without a main guard.

    Inside, they are handed over in this process.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before
