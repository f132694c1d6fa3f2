"""Explanations of size errors in the first run: torch's error names no module, and may come from a sync."""

from __future__ import annotations

from typing import Any

from torch import nn

from slapo_tracing.nodes import model_source

from ..rules.sharding_rule import AppliedCut, split_of
from ..syncs.sync_hooks import first_input, syncs_of

SIZE_ERRORS = (RuntimeError, ValueError, IndexError, AssertionError)
"""Errors of torch and of Python code for an unexpected size."""

_GROUPED = "multiple of 16 bytes"


def explain_size_error(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], err: Exception, part_of: str | None
) -> str | None:
    """Return why the innermost failed module failed; None if the error is not about sizes.

    The inputs are those from before the module's own syncs. ``part_of`` is the path of the sharded layer inside that ran last.
    """
    applied, x = split_of(module), first_input(args, kwargs)
    own = [f"sync({sync.mode!r}, {sync.op!r})" for sync in syncs_of(module, "fwd_pre")]
    line = str(err).partition("\n")[0]
    if applied is not None and _GROUPED in line:
        return _too_narrow(module, applied)
    words = ("unpack", "shape", "size", "dimension", "index out of range")
    may_be_of_sizes = isinstance(err, RuntimeError) or not line or any(word in line for word in words)
    if part_of is not None and applied is None and may_be_of_sizes:
        return _whole_size_in_code(err, line, part_of)
    if not isinstance(err, RuntimeError) or not any(word in line for word in ("shape", "size", "dimension")) or x is None:
        return None
    shape = x.shape
    if applied is not None and applied.cut.input == "sharded" and not own:
        dim = applied.cut.dim
        if -len(shape) <= dim < len(shape) and shape[dim] == applied.spec.full_shape[applied.spec.dim]:
            what = f"it is split along its input and is given all {shape[dim]} of it"
            return f"{what}; needs sync('fwd_pre', 'scatter', axis={dim})"
    after = f", which {' and '.join(own)} then changes" if own else ""
    return f"it fails, {line}, given {list(shape)}{after}; look whether syncs there and before gather or scatter twice"


def _whole_size_in_code(err: Exception, line: str, part_of: str) -> str:
    """Return the reason for code that takes sizes from whole values, which tensor_parallel() without a plan divides."""
    what = line if isinstance(err, RuntimeError) else f"{type(err).__name__}: {line}".rstrip(": ")
    return (
        f"it fails at {model_source(err)}, {what}, where each rank has a part of the output of {part_of!r}; tensor_parallel() "
        "without plan= divides sizes that code takes from whole values; or gather the output there, "
        "sync('fwd_post', 'all_gather', axis=-1), with what follows whole"
    )


def _too_narrow(module: nn.Module, applied: AppliedCut) -> str:
    """Return the reason for stacked experts whose shard has unaligned rows, which ``grouped_mm`` refuses."""
    whole, ranks = applied.spec.blocks[0], applied.spec.num_shards
    size = whole // ranks * next(module.parameters()).element_size()
    return (
        f"each rank has {whole // ranks} of an expert's {whole} numbers, {size} bytes, and "
        f"torch's grouped_mm takes a {_GROUPED}; use fewer ranks, or set_experts_implementation('batched_mm') of the model"
    )
