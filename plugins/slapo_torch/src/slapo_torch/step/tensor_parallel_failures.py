"""Errors on some tensor-parallel ranks only: the others wait for these in a collective, which no other one may answer."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from slapo_core import BuildError

from ..gradients._torch_private import default_store

GRACE = timedelta(seconds=5)
"""Time in which tensor-parallel peers of a rank that failed may fail as well, as they do when the error is in the code."""

_engines: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


class TensorParallelPeers:
    """The tensor-parallel ranks of one engine, made on all of them; what they tell each other goes through the store only.

    Args:
        group: These ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        made = _engines.setdefault(group, Counter())
        made["engines"] += 1
        self._ranks = dist.get_process_group_ranks(group)
        self._key = f"slapo/{group.group_name}/{made['engines']}"
        self._step = 0
        self._is_lost = False

    def begin_step(self) -> None:
        """Count a step.

        Raises:
            BuildError: these ranks are out of step since an earlier error.
        """
        if self._is_lost:
            raise BuildError(
                "the tensor-parallel ranks are out of step since an error on one of them; start the processes again"
            )
        self._step += 1

    def synchronize_failure(self, error: Exception) -> None:
        """Come back when all have failed in this step, and can go on to agree about it.

        Else this rank leaves with its error. Peers that it has left alone raise its message as well, once they notice.

        Raises:
            Exception: ``error``, when others have not failed in time.
            BuildError: with the message of a rank that left.
        """
        key = f"{self._key}/{self._step}"
        self._is_lost = True
        with suppress(RuntimeError):  # the process that kept the store may have ended
            store = default_store()
            if store.check([f"{key}/left"]):
                raise BuildError(store.get(f"{key}/left").decode()) from error
            store.set(f"{key}/{dist.get_rank()}", "failed")
            with suppress(RuntimeError):  # the time is up
                store.wait([f"{key}/{rank}" for rank in self._ranks], GRACE)
                self._is_lost = False
                return
            store.set(f"{key}/left", f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}")
        raise error
