"""Copies of models that keep the gradient hooks and the attributes of their parameters."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from slapo_core import Schedule

T = TypeVar("T", nn.Module, Schedule)


def copy_model(value: T) -> T:
    """Copy a model, or a schedule with its model, with the hooks and attributes of its parameters.

    ``copy.deepcopy`` drops both, and a copy without them trains differently. The copies share them: a hook that refers to a
    parameter of the original still does.
    """
    made = copy.deepcopy(value)
    old, new = (each.mod if isinstance(each, Schedule) else each for each in (value, made))
    for one, other in zip(old.parameters(), new.parameters(), strict=True):
        vars(other).update({name: each for name, each in vars(one).items() if name not in vars(other)})
        _copy_hooks(one, other)
    return made


def _copy_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    if not new.requires_grad:
        return
    if not new._backward_hooks:
        for hook in (old._backward_hooks or {}).values():
            new.register_hook(hook)  # type: ignore[no-untyped-call]
    if not new._post_accumulate_grad_hooks:
        for hook in (old._post_accumulate_grad_hooks or {}).values():
            new.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
