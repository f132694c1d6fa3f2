"""Kernels compiled by inductor from their eager functions, at the first call.

Their random numbers are those of the eager functions for the same random state.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import eager

_SETTINGS: dict[str, Any] = {
    "options": {"fallback_random": True},
    "recompile_limit": 32,  # for dtypes, numbers of dimensions, and whether gradients are asked for
    "isolate_recompiles": True,
}


@functools.cache
def _compile_kernel(kernel: str, options: tuple[tuple[str, Any], ...]) -> Any:
    return torch.compile(functools.partial(getattr(eager, kernel), **dict(options)), **_SETTINGS)


_WORTHWHILE = 1 << 16
"""Elements of the first argument from which a compiled function is faster, despite the overhead of its call."""


def avoids(first: torch.Tensor, *args: Any, activation: str | None = None, **options: Any) -> bool:
    """Return whether eager is faster: for small inputs, and on a CPU for relu, whose compiled backward is slow."""
    return first.numel() < _WORTHWHILE or (activation == "relu" and first.device.type == "cpu")


def _run(kernel: str, *tensors: Any, **options: Any) -> Any:
    return _compile_kernel(kernel, tuple(sorted(options.items())))(*tensors)


rotary = functools.partial(_run, "rotary")
rms_norm = functools.partial(_run, "rms_norm")
layer_norm = functools.partial(_run, "layer_norm")
swiglu = functools.partial(_run, "swiglu")
geglu = functools.partial(_run, "geglu")
bias_act = functools.partial(_run, "bias_act")
bias_dropout_residual = functools.partial(_run, "bias_dropout_residual")
