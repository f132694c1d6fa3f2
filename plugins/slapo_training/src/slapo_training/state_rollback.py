"""Rollback of buffers behind an extra run of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def buffer_rollback(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of a module and of those in it at the end, so that a second run starts from the same ones."""
    saved = [
        (table, name, tensor, tensor.clone())
        for table in (each._buffers for each in module.modules())
        for name, tensor in table.items()
        if tensor is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for table, name, tensor, values in saved:
                table[name] = tensor
                tensor.copy_(values)
