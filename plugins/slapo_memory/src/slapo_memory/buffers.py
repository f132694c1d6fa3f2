"""Buffers that a forward changes, such as BatchNorm's running statistics: a recompute sees what the forward saw.

The recompute gets copies in their place, so that the module's own buffers advance once, and autograd may keep the copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class _Entry:
    """One buffer of one module as it was when the forward started."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor | None
    copy: torch.Tensor | None
    version: int

    def changed(self) -> bool:
        """Whether the buffer is another tensor now, or was or may have been written to."""
        other = self.owner._buffers.get(self.name) is not self.tensor
        return other or _version(self.tensor) != self.version or _is_statistic(self.tensor)


class StartBuffers:
    """The buffers at and below a module as of now.

    Args:
        module: Where to look; None for nothing.
    """

    def __init__(self, module: nn.Module | None) -> None:
        copies: dict[int, torch.Tensor | None] = {id(None): None}
        self._entries: list[_Entry] = []
        for owner in module.modules() if module is not None else ():
            for name, tensor in owner._buffers.items():
                if id(tensor) not in copies:
                    copies[id(tensor)] = _copy(tensor)
                self._entries.append(_Entry(owner, name, tensor, copies[id(tensor)], _version(tensor)))

    def keep_changed(self) -> None:
        """Forget the buffers that are as they were; call it after the forward."""
        self._entries = [entry for entry in self._entries if entry.changed()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run a block with the buffers as they were at the start; afterwards the module has those of before the block."""
        now = [entry.owner._buffers.get(entry.name) for entry in self._entries]
        again: dict[int, torch.Tensor | None] = {}
        for entry in self._entries:
            if id(entry.copy) not in again:
                again[id(entry.copy)] = _copy(entry.copy)
            entry.owner._buffers[entry.name] = again[id(entry.copy)]
        try:
            yield
        finally:
            for entry, tensor in zip(self._entries, now, strict=True):
                entry.owner._buffers[entry.name] = tensor


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _version(tensor: torch.Tensor | None) -> int:
    """How often the tensor was written to; an inference tensor does not count it, nor may a forward with gradients write."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _is_statistic(tensor: torch.Tensor | None) -> bool:
    """Whether it may be a mean or a variance: batch norm's kernels write to these vectors without counting a version."""
    return tensor is not None and tensor.dim() == 1 and tensor.is_floating_point()
