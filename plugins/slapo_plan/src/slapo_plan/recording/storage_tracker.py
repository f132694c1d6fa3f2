"""Count of the bytes of all tensor storages, on real or fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ._torch_private import FakeTensor, storage_key


class StorageTracker:
    """Counts the bytes of storages until they are freed.

    A storage counts once, also with several views. Memory inside of an operator and memory of communicators is not seen.

    Attributes:
        live: Bytes that are allocated now.
        peak: Most bytes since the last ``begin_segment``.
        freed: Bytes that were freed since then, by the segment that allocated them.
    """

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self.freed: Counter[str] = Counter()
        self._segment = ""
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, str]] = {}

    def add(self, values: Any) -> None:
        """Count the storages of the tensors in nested containers, if they are new."""
        for value in (values,) if isinstance(values, torch.Tensor) else tree_leaves(values):
            if isinstance(value, torch.Tensor) and has_own_memory(value):
                for storage in storages_of(value):
                    self._add_storage(storage)

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never count the storages of some tensors, nor of their views."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage_key(storage)] = weakref.ref(storage), 0, ""

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_key(storage), storage.nbytes()
        if key in self._known or not size:
            return

        def free(_: object) -> None:
            _, nbytes, owner = self._known.pop(key)
            self.live -= nbytes
            self.freed[owner] += nbytes

        self._known[key] = weakref.ref(storage, free), size, self._segment
        self._grow(size)

    def _grow(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        """Count a storage whose size has changed; FSDP2 frees and allocates gathered parameters so."""
        key, size = storage_key(storage), storage.nbytes()
        if key not in self._known:
            self._add_storage(storage)
            return
        reference, before, owner = self._known[key]
        self._known[key] = reference, size, owner
        self._grow(size - before)

    def begin_segment(self, name: str = "") -> None:
        """Begin a part of the run: the peak starts at what is live, and nothing was freed."""
        self._segment, self.peak, self.freed = name, self.live, Counter()


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Return False for a subclass that wraps other tensors, such as a DTensor: its storage has a size, but no memory."""
    return isinstance(tensor, FakeTensor) or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.jagged: ("values", "offsets"),
}
"""Methods that return the dense parts of a tensor, by its layout."""


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor: one, or those of the parts of a sparse one."""
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    return [getattr(tensor, name)().untyped_storage() for name in _PARTS.get(tensor.layout, ())]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of some tensors, shared ones once."""
    return sum({storage_key(each): each.nbytes() for tensor in tensors for each in storages_of(tensor)}.values())


@contextmanager
def resizes_noted(tracker: StorageTracker) -> Iterator[None]:
    """Context in which a tracker sees storages that Python code resizes; no operator tells of them."""
    resize = torch.UntypedStorage.resize_

    def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        tracker.note_resize(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_note  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
