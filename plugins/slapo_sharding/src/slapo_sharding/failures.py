"""What to say where a size does not fit at the first run: torch's error names no module, and may come from a sync."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slapo_core.errors import ScheduleError

from .moves import syncs_of
from .rules import applied_cut
from .syncing import map_input


def reason(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], err: Exception) -> str | None:
    """Why the innermost module that failed did; None where it is not for its sizes.

    Args:
        module: The module.
        args: What it was called with, before its own syncs.
        kwargs: The same.
        err: What torch raised.
    """
    applied, shape = applied_cut(module), _shape(args, kwargs)
    own = [f"sync({sync.mode!r}, {sync.op!r})" for sync in syncs_of(module) if sync.mode == "fwd_pre"]
    line = str(err).partition("\n")[0]
    if not any(word in line for word in ("shape", "size", "dimension")) or shape is None:
        return None
    if applied is not None and applied.cut.input == "sharded" and applied.spec.num_shards > 1 and not own:
        dim = applied.cut.dim
        if -len(shape) <= dim < len(shape) and shape[dim] == applied.spec.full_shape[applied.spec.dim]:
            return (
                f"it is split along its input and is given all {shape[dim]} of it; needs sync('fwd_pre', 'scatter', axis={dim})"
            )
    after = f", which {' and '.join(own)} then changes" if own else ""
    return f"it fails, {line}, given {list(shape)}{after}; look whether syncs there and before gather or scatter twice"


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Size | None:
    """Of the input that syncs are about."""
    found: list[torch.Size] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(x.shape)
        return x

    try:
        map_input(note, args, kwargs)
    except ScheduleError:  # none of floating point
        return None
    return found[0]
