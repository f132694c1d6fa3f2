"""Full tensors from shards, and shards from full tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from slapo_core import ScheduleError, is_sharded, shard_spec
from slapo_training.distributed import original_keys, over_group


def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full parameter or buffer as a new tensor without a gradient, on every rank of its group.

    Collective over the group.
    """
    full = over_group(tensor, lambda own: own)
    assert full is not None
    return full


def scatter_full(tensor: torch.Tensor, full: torch.Tensor) -> None:
    """Overwrite a parameter or buffer with this rank's shard of ``full``, without communication.

    Args:
        tensor: Changed in place; it keeps its dtype and device.
        full: The full tensor, the same on every rank.

    Raises:
        ScheduleError: another shape, or a tensor on meta, which has no data; nothing was changed.
    """
    if problem := _problem(tensor, full):
        raise ScheduleError(f"scatter_full: {problem}")
    _write(tensor, full)


def load_full_state(module: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Overwrite a module's parameters and buffers with this rank's shards of full tensors, without communication.

    Args:
        module: The scheduled module, or the module of an engine without pipeline stages.
        state: Full tensors under the unmodified model's names, as in ``Schedule.full_state`` or its ``state_dict``, the same on
            every rank. One name of a tied parameter is enough.
        strict: Refuse a state that lacks a parameter or has a name that the module lacks.

    Raises:
        ScheduleError: such a name, tied tensors that differ, another shape, or a tensor on meta; nothing was changed.
    """
    named = dict([*module.named_parameters(), *module.named_buffers()])
    keys = original_keys(named.items())
    given = {name: [key for key in keys[name] if key in state] for name in named}
    problems: list[str] = []
    for name, names in given.items():
        for key in names:
            if problem := _problem(named[name], state[key]):
                problems.append(f"{key!r}: {problem}")
            elif state[key] is not state[names[0]] and not torch.equal(state[key], state[names[0]]):
                problems.append(f"{names[0]!r} and {key!r} are tied and differ")
    if strict:
        parameters = dict(module.named_parameters())
        missing = [keys[name][0] for name in parameters if not given[name]]
        unknown = sorted(set(state) - {key for names in keys.values() for key in names})
        problems += [f"{what} {names}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
    if problems:
        raise ScheduleError(f"load_full_state: {'; '.join(problems)}; give full tensors under the unmodified model's names")
    for name, names in given.items():
        if names:
            _write(named[name], state[names[0]])


def _problem(tensor: torch.Tensor, full: torch.Tensor) -> str | None:
    """Return why ``full`` cannot be the full value of ``tensor``, or None."""
    spec = shard_spec(tensor)
    shape = spec.full_shape if spec is not None else tuple(tensor.shape)
    if not isinstance(full, torch.Tensor):
        return f"a {type(full).__name__} is not a tensor"
    if tuple(full.shape) != tuple(shape):
        return f"shape {list(full.shape)} instead of {list(shape)}"
    return "it is on meta and holds nothing; build the schedule first" if tensor.is_meta else None


@torch.no_grad()
def _write(tensor: torch.Tensor, full: torch.Tensor) -> None:
    spec = shard_spec(tensor)
    tensor.copy_(spec.local(full) if spec is not None and is_sharded(tensor) else full)
