"""What to say where a size does not fit at the first run: torch's error names no module, and may come from a sync."""

from __future__ import annotations

from typing import Any

from torch import nn

from .rules import AppliedCut, split_of
from .syncing import first_input, syncs_of

_GROUPED = "multiple of 16 bytes"


def reason(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], err: Exception) -> str | None:
    """Why the innermost module that failed did; None where it is not for its sizes.

    Args:
        module: The module.
        args: What it was called with, before its own syncs.
        kwargs: The same.
        err: What torch raised.
    """
    applied, x = split_of(module), first_input(args, kwargs)
    own = [f"sync({sync.mode!r}, {sync.op!r})" for sync in syncs_of(module, "fwd_pre")]
    line = str(err).partition("\n")[0]
    if applied is not None and _GROUPED in line:
        return _too_narrow(module, applied)
    if not any(word in line for word in ("shape", "size", "dimension")) or x is None:
        return None
    shape = x.shape
    if applied is not None and applied.cut.input == "sharded" and not own:
        dim = applied.cut.dim
        if -len(shape) <= dim < len(shape) and shape[dim] == applied.spec.full_shape[applied.spec.dim]:
            return (
                f"it is split along its input and is given all {shape[dim]} of it; needs sync('fwd_pre', 'scatter', axis={dim})"
            )
    after = f", which {' and '.join(own)} then changes" if own else ""
    return f"it fails, {line}, given {list(shape)}{after}; look whether syncs there and before gather or scatter twice"


def _too_narrow(module: nn.Module, applied: AppliedCut) -> str:
    """Torch multiplies stacks of experts whose rows are aligned only."""
    whole, ranks = applied.spec.blocks[0], applied.spec.num_shards
    size = whole // ranks * next(module.parameters()).element_size()
    return (
        f"each rank has {whole // ranks} of an expert's {whole} numbers, {size} bytes, and "
        f"torch's grouped_mm takes a {_GROUPED}; use fewer ranks, or set_experts_implementation('batched_mm') of the model"
    )
