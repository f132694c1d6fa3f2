"""A checkpoint that is written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
import torch.distributed as dist

from slapo_core import BuildError, Program, SlapoError, failure_reason, get_logger

from ..distributed.ranks import Ranks

Buffers = dict[Any, torch.Tensor]
"""Memory on the CPU that what is written is copied to first, kept from one save to the next; by what each is the copy of."""


class SaveHandle:
    """Handle of a save; the checkpoint is complete when ``wait`` returns.

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
        """True if the checkpoint is written, or has failed."""
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
        except BaseException as err:  # nobody hears of the end of a thread
            self._error = (
                err if isinstance(err, Exception) else BuildError(f"the checkpoint was not written: {failure_reason(err)}")
            )
            get_logger().error("in the background: %s", err if isinstance(err, SlapoError) else failure_reason(err))
        del self._write  # it holds what was written


class Saver:
    """Writes checkpoints of one engine, one after the other.

    Args:
        program: The engine's.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._ranks: Ranks | None = None
        self._apart: Ranks | None = None
        self._last: SaveHandle | None = None
        self._copies: Buffers = {}

    def write(self, prepare: Callable[[Ranks, Buffers | None], Callable[[Ranks], None]], waits: bool) -> SaveHandle:
        """Write a checkpoint. Collective.

        Args:
            prepare: Given the ranks, gives what writes the engine as it is now, and has the numbers in the memory that it is
                given, or with None may take them from the engine as it writes. What it gives is given the ranks to meet, and
                meets no others.
            waits: Whether to return when it is written, not when it is prepared.

        Raises:
            SlapoError: on every rank: what ``prepare`` raises, and nothing was written; or it could not be written, and the
                folder has the checkpoint it had.
            Exception: what kept the checkpoint before from being written, if nobody has waited for it.
        """
        ranks = self.finish_last_save()
        if len(set(ranks.run_on_all(lambda: _checked(waits)))) > 1:
            raise BuildError("some ranks save with wait=True and others with wait=False; give all of them the same")
        meeting = ranks
        if not waits:
            meeting = self._apart = self._apart or ranks.in_new_group()
        put = prepare(ranks, None if waits else self._copies)
        self._last = SaveHandle(lambda: put(meeting), waits)
        return self._last

    def wait(self) -> None:
        """Return when the last checkpoint is written; raises what kept it from that."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def finish_last_save(self) -> Ranks:
        """Go on when the last checkpoint is written, and give the ranks. Collective.

        Raises:
            Exception: on every rank: what kept it from being written, unless all ranks have heard of it.
        """
        ranks = self._ranks = self._ranks or Ranks.of(self._program)
        ranks.run_on_all(self.wait)
        return ranks

    def close(self) -> None:
        """Wait, and give back what only a checkpoint in the background needs."""
        try:
            self.wait()
        finally:
            self._copies.clear()
            apart, self._apart = self._apart, None
            if apart is not None and apart.group is not None:
                dist.destroy_process_group(apart.group)


def _checked(waits: bool) -> bool:
    if type(waits) is not bool:
        raise BuildError(f"wait is {waits!r}; give True or False")
    return waits


def copy_to_cpu(tensor: torch.Tensor, key: Hashable, buffers: Buffers) -> torch.Tensor:
    """A tensor as it is now, on the CPU, in the memory of its key."""
    kept = buffers.get(key)
    if kept is None or kept.shape != tensor.shape or kept.dtype is not tensor.dtype:
        kept = buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return kept.copy_(tensor)


def drop_other_buffers(keys: Collection[Hashable], buffers: Buffers) -> None:
    """Give back the memory of other keys than these."""
    for key in set(buffers).difference(keys):
        del buffers[key]
