"""Saves in the background, while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
import torch.distributed as dist

from slapo_core import BuildError, Program, SlapoError, failure_reason, get_logger

from ..distributed.ranks import Ranks

Buffers = dict[Any, torch.Tensor]
"""CPU memory for copies of saved tensors, by key, reused from one save to the next."""


class SaveHandle:
    """Handle of a save; the checkpoint is complete when ``wait`` returns.

    Args:
        write: Writes the checkpoint; raises the same error on all ranks if one fails.
        waits: True to write in this thread now.
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
        """Return True once the checkpoint is written or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is written.

        Raises:
            Exception: the error of the write; raised once.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as err:  # an error in a thread would be lost
            self._error = (
                err if isinstance(err, Exception) else BuildError(f"the checkpoint was not written: {failure_reason(err)}")
            )
            get_logger().error("in the background: %s", err if isinstance(err, SlapoError) else failure_reason(err))
        del self._write  # frees the copies


class Saver:
    """Writes checkpoints of one engine, one at a time."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._ranks: Ranks | None = None
        self._background_ranks: Ranks | None = None
        self._last: SaveHandle | None = None
        self._copies: Buffers = {}

    def write(self, prepare: Callable[[Ranks, Buffers | None], Callable[[Ranks], None]], waits: bool) -> SaveHandle:
        """Write a checkpoint; return after the write if it ``waits``, else after ``prepare``. Collective.

        ``prepare`` is called with the ranks and CPU buffers; it returns a function that writes the engine's current state,
        and that is called with the ranks to use. It copies tensors to the buffers; with None it may read the engine later.

        Raises:
            SlapoError: on every rank: ``prepare`` failed and nothing was written; or the write failed and the folder still
                has the old checkpoint.
            Exception: the error of the save before, if it was not raised yet.
        """
        ranks = self.finish_last_save()
        if len(set(ranks.run_on_all(lambda: _check_wait(waits)))) > 1:
            raise BuildError("some ranks save with wait=True and others with wait=False; give all of them the same")
        meeting = ranks
        if not waits:
            meeting = self._background_ranks = self._background_ranks or ranks.in_new_group()
        put = prepare(ranks, None if waits else self._copies)
        self._last = SaveHandle(lambda: put(meeting), waits)
        return self._last

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raise the error of its write."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def finish_last_save(self) -> Ranks:
        """Wait until the last checkpoint is written; return the ranks. Collective.

        Raises:
            Exception: on every rank: the error of the write, unless it was raised on all ranks before.
        """
        ranks = self._ranks = self._ranks or Ranks.of(self._program)
        ranks.run_on_all(self.wait)
        return ranks

    def close(self) -> None:
        """Wait for the last write, and free buffers and process group of background writes."""
        try:
            self.wait()
        finally:
            self._copies.clear()
            background, self._background_ranks = self._background_ranks, None
            if background is not None and background.group is not None:
                dist.destroy_process_group(background.group)


def _check_wait(waits: bool) -> bool:
    if type(waits) is not bool:
        raise BuildError(f"wait is {waits!r}; give True or False")
    return waits


def copy_to_cpu(tensor: torch.Tensor, key: Hashable, buffers: Buffers) -> torch.Tensor:
    """Copy a tensor to the CPU buffer of its key; return the copy."""
    kept = buffers.get(key)
    if kept is None or kept.shape != tensor.shape or kept.dtype is not tensor.dtype:
        kept = buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return kept.copy_(tensor)


def drop_other_buffers(keys: Collection[Hashable], buffers: Buffers) -> None:
    for key in set(buffers).difference(keys):
        del buffers[key]
