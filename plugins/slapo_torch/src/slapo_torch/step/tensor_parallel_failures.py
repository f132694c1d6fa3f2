"""Errors on some tensor-parallel ranks only, while the other ranks wait for them in a collective of the model.

Failed ranks must not start another collective: it would answer the one that the others wait in. They use torch's store.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from slapo_core import BuildError

from ..gradients._torch_private import default_store

GRACE = timedelta(seconds=5)
"""Time in which the tensor-parallel peers of a failed rank may fail too; an error in code fails on all ranks."""

_engines: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


class TensorParallelPeers:
    """Tensor-parallel ranks of one engine, which report errors to each other through torch's store only. Made collectively."""

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
            BuildError: these ranks are out of step after an earlier error.
        """
        if self._is_lost:
            raise BuildError(
                "the tensor-parallel ranks are out of step since an error on one of them; start the processes again"
            )
        self._step += 1

    def synchronize_failure(self, error: Exception) -> None:
        """Wait until all peers have failed in this step too; then they can reduce the error together.

        If some peers do not fail in time, this rank raises its error and leaves. Peers that fail later raise its message.

        Raises:
            Exception: ``error``, if some peers did not fail within ``GRACE``.
            BuildError: another rank has left; with its message.
        """
        key = f"{self._key}/{self._step}"
        self._is_lost = True
        with suppress(RuntimeError):  # the process of the store may have ended
            store = default_store()
            if store.check([f"{key}/left"]):
                raise BuildError(store.get(f"{key}/left").decode()) from error
            store.set(f"{key}/{dist.get_rank()}", "failed")
            with suppress(RuntimeError):  # timeout
                store.wait([f"{key}/{rank}" for rank in self._ranks], GRACE)
                self._is_lost = False
                return
            store.set(f"{key}/left", f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}")
        raise error
