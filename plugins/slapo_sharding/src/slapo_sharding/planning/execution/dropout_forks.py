"""Dropout under tensor parallelism: each rank has its own masks for sharded values; masks for whole values are equal."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from slapo_core import Schedule

from ...splitting import attention_heads
from ..derivation.replicated_modules import plan_error

_INSIDE = ("attn_dropout", "attention_dropout")
_OUTSIDE = ("resid_dropout", "resid_pdrop")
_RATES = ("attention_dropout", "attn_dropout", "dropout", "activation_dropout", "hidden_dropout")


def fork_dropouts(schedule: Schedule, paths: Iterable[str]) -> None:
    """Fork the random numbers of the attention modules around the split modules at ``paths``.

    Raises:
        ScheduleError: a dropout may see sharded or replicated values.
    """
    owners = {path.rpartition(".")[0]: None for path in sorted(paths)}
    for path in owners:
        handle = schedule[path] if path else schedule
        names = set(handle.mod._modules)
        if any(attention_heads.makes_heads(handle.mod, name) for name in names):
            _fork_attention(handle)
        elif not {"c_fc", "c_proj", "dropout"} <= names:  # GPT-2's comes after the output projection
            _refuse(handle, [*_active_dropouts(handle.mod), *_rates(handle.mod)])


def _fork_attention(handle: Schedule) -> None:
    active = _active_dropouts(handle.mod)
    _refuse(handle, [name for name in active if name not in (*_INSIDE, *_OUTSIDE)])
    if not _rates(handle.mod) and not any(name in _INSIDE for name in active):
        return
    handle.fork_rng()
    for name in active:
        if name in _OUTSIDE:
            handle[name].fork_rng(outside=True)


def _active_dropouts(module: nn.Module) -> list[str]:
    """Return the names of the dropout children of a module with a rate above 0."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)
    return [name for name, child in module.named_children() if isinstance(child, kinds) and child.p > 0]


def _rates(module: nn.Module) -> list[str]:
    """Return the names of the rates above 0 that a module passes to a dropout function."""
    return [name for name in _RATES if isinstance(rate := module.__dict__.get(name), float) and rate > 0]


def _refuse(handle: Schedule, names: list[str]) -> None:
    if names:
        what = f"{names[0]!r} may see sharded or replicated values"
        raise plan_error(handle, f"{what}; set it to 0, or use shard() and fork_rng()")
