"""Sharding rule for projections of any class, found by a numeric probe.

A projection takes one value of ``[..., in_features]`` and returns one of ``[..., out_features]``: an adapter that multiplies by
parameters of its own, a Linear with a norm of its weight's rows, quantised storage with scales. ``projection_probe`` finds the
tensors that are split.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Hashable
from contextlib import redirect_stdout

import torch
from torch import nn

from .parametrizations import parametrization_hooks
from .projection_probe import NAMES, ProjectionProbe
from .sharding_rule import Cut, ShardingRule, applied_cut, computes_as

KIND = "projection"
_PLAIN = (int, float, bool, str, type(None), tuple, list, dict, torch.Size)
_known: dict[Hashable, tuple[Cut, ...]] = {}


def projection_rule(module: nn.Module, ranks: int) -> ShardingRule | None:
    """Return the rule for a module that is a projection, over ``ranks`` ranks; None for any other.

    A module that only calls layers is not a projection: its layers are split instead.
    """
    applied = applied_cut(module)
    if applied is not None:
        return ShardingRule(KIND, lambda each: each is module, (applied.cut,)) if applied.cut.shown else None
    sizes = _sizes(module)
    if sizes is None or _has_hooks(module) or not _takes_one_value(module):
        return None
    key = ranks, _signature(module)
    if key not in _known:
        _known[key] = _cuts(module, ranks, *sizes)
    return ShardingRule(KIND, lambda each: each is module, _known[key]) if _known[key] else None


def is_projection(module: nn.Module) -> bool:
    """Return whether a module has attributes for its input and output widths, and matrices of its own."""
    held = [*module._parameters.values(), *module._buffers.values()]
    return _own_sizes(module) is not None and any(each is not None and each.dim() > 1 for each in held)


def _cuts(module: nn.Module, ranks: int, inputs: int, outputs: int) -> tuple[Cut, ...]:
    try:
        with torch.random.fork_rng(devices=[]), redirect_stdout(io.StringIO()):
            probe = ProjectionProbe(module, ranks, inputs, outputs)
            is_projection = probe.is_needed() and (_own_sizes(module) is not None or not probe.mixes_rows())
            return tuple(probe.cuts()) if is_projection else ()
    except Exception:  # an unknown forward may raise anything on random numbers
        return ()


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return the widths of input and output: the module's own, or those of the largest layer inside it."""
    own = _own_sizes(module)
    if own is not None:
        return own
    if not type(module).__module__.startswith("torch."):
        found = [sizes for each in module.children() if (sizes := _own_sizes(each)) is not None]
        return max(found, key=lambda sizes: sizes[0] * sizes[1], default=None)
    return None


def _own_sizes(module: nn.Module) -> tuple[int, int] | None:
    inputs, outputs = (
        next((value for name in names if type(value := getattr(module, name, None)) is int), None) for names in NAMES
    )
    return None if inputs is None or outputs is None else (inputs, outputs)


def _has_hooks(module: nn.Module) -> bool:
    """Return whether hooks run with the module, or tensors are computed by hooks, which have rules of their own."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(
        "forward" in each.__dict__ or parametrization_hooks(each) or any(each.__dict__[table] for table in tables)
        for each in module.modules()
    )


def _takes_one_value(module: nn.Module) -> bool:
    if computes_as(module, nn.Linear, nn.Bilinear, nn.Identity) and "parametrizations" not in module._modules:
        return False
    try:
        inspect.signature(type(module).forward).bind(module, None)
    except (TypeError, ValueError):
        return False
    return True


def _signature(module: nn.Module) -> Hashable:
    """Return the key of modules with the same cuts: classes, shapes and settings."""
    state = [(name, tuple(each.shape), each.dtype) for name, each in (*module.named_parameters(), *module.named_buffers())]
    settings, own = [], nn.Module().__dict__.keys()
    for path, each in module.named_modules():
        plain = {name: value for name, value in vars(each).items() if name not in own and isinstance(value, _PLAIN)}
        settings.append((path, type(each), repr(plain)))
    return tuple(state), tuple(settings)
