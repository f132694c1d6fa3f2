"""Copies of an optimizer with a few small parameters in the places of its own."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from slapo_core import shard_spec

from ...gradient_hooks.sharded_hooks import is_shaped_like
from .introspection import Optimizer, groups_in, optimizers_in, plain_values_of

_REPRESENTATIVES = 2
_NUMBERS = ("_fsdp_orig_uid",)
"""Attributes that number parameters; they would make each parameter a kind of its own."""


def copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer and its nested optimizers; ``copy.deepcopy`` would keep state and groups only."""
    found = optimizers_in(optimizer)
    for each in found:
        memo[id(each)] = object.__new__(type(each))
    for each in found:
        for name, value in vars(each).items():
            if name.startswith("_optimizer_") and name.endswith("hooks"):
                vars(memo[id(each)])[name] = type(value)()
            elif name != "step":  # a learning-rate schedule replaces ``step`` by a function of the original
                vars(memo[id(each)])[name] = copy.deepcopy(value, memo)
    made: Optimizer = memo[id(optimizer)]
    return made


def substituted_states(optimizer: Optimizer, memo: dict[int, Any]) -> dict[int, Any]:
    """Return replacements of an optimizer's per-element tensors, by id."""
    found: dict[int, Any] = {}
    for each in optimizers_in(optimizer):
        for table in (value for value in vars(each).values() if isinstance(value, dict)):
            kept = defaultdict[Any, list[tuple[torch.Tensor, torch.Tensor]]](list)
            for parameter, state in (item for item in table.items() if id(item[0]) in memo):
                for name, value in (state if isinstance(state, dict) else {None: state}).items():
                    if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
                        kept[name].append((parameter, value))
            for pairs in kept.values():
                # accumulators that start at zero equal parameters that start at zero, e.g. biases
                are_copies = all(torch.equal(*pair) for pair in pairs) and any(bool(value.any()) for _, value in pairs)
                for parameter, value in pairs:
                    new = memo[id(parameter)]
                    found[id(value)] = new.detach().clone() if are_copies else _shaped_like(value, new).to(value.dtype)
    return found


def representatives(optimizer: Optimizer, merges: bool) -> list[nn.Parameter]:
    """Return a few parameters of each kind that an optimizer may treat differently.

    With ``merges``, groups that differ in numbers only count as one kind, e.g. with one learning rate per layer.
    """
    seen: dict[Any, int] = {}
    chosen: dict[int, nn.Parameter] = {}
    for number, group in enumerate(groups_in(optimizer)):
        for parameter in group["params"]:
            marks = [
                (name, repr(value))
                for name, value in vars(parameter).items()
                if isinstance(value, bool | int | float | str) and name not in _NUMBERS
            ]
            kind = (
                _options(group) if merges else number,
                parameter.dim(),
                parameter.dtype,
                tuple(marks),
                plain_values_of(optimizer, parameter),
            )
            if parameter.requires_grad and seen.setdefault(kind, 0) < _REPRESENTATIVES:
                seen[kind] += 1
                chosen[id(parameter)] = parameter
    return list(chosen.values())


def _options(group: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    given = ((key, value) for key, value in group.items() if key not in ("params", "param_names"))
    return tuple((key, repr(value != 0 if isinstance(value, float) else value)) for key, value in given)


def probe_parameter(old: nn.Parameter, value: torch.Tensor, is_bare: bool = False) -> nn.Parameter:
    """Return a parameter with this value and the attributes of ``old``; without attributes if ``is_bare``."""
    new = nn.Parameter(value.detach().to(old.dtype).clone())
    if is_bare:
        return new
    spec = shard_spec(old)
    shapes = [tuple(old.shape), *([] if spec is None else [tuple(spec.full_shape)])]
    for name, each in vars(old).items():
        vars(new)[name] = _shaped_like(each, new) if any(is_shaped_like(each, shape) for shape in shapes) else each
    return new


def _shaped_like(mask: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the first element of a mask expanded to another shape; whole and parts then have equal masks."""
    values = mask.detach().reshape(-1)[:1]
    return values.expand(new.numel()).reshape(new.shape).clone()
