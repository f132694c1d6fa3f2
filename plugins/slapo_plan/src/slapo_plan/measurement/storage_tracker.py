"""Count of the bytes of all tensor storages, on real or fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ._torch_private import storage_key


class StorageTracker:
    """Counts the bytes of storages until they are freed.

    A storage counts once, also with several views. Memory inside of an operator and memory of communicators is not seen.

    Attributes:
        live: Bytes that are allocated now.
        peak: Most bytes since the last ``begin_peak``.
    """

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, values: Any) -> None:
        """Count the storages of the tensors in nested containers, if they are new."""
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self._add_storage(value.untyped_storage())

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never count the storages of some tensors, nor of their views."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage_key(storage)] = weakref.ref(storage)

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_key(storage), storage.nbytes()
        if key in self._known or not size:
            return

        def free(_: object) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, free)
        self.live += size
        self.peak = max(self.peak, self.live)

    def add_transient(self, size: int) -> None:
        """Count bytes that are allocated for a moment beside all that is live."""
        self.peak = max(self.peak, self.live + size)

    def begin_peak(self) -> None:
        """Forget the peak; it starts at what is live."""
        self.peak = self.live


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of some tensors, shared ones once."""
    return sum({storage_key(storage): storage.nbytes() for each in tensors if (storage := each.untyped_storage())}.values())
