"""Tie groups of a program: the parameters that several pipeline stages share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from slapo_core import TieGroup


def tie_groups(module: nn.Module, stages: Sequence[nn.Module]) -> tuple[TieGroup, ...]:
    """Return the parameters of ``module`` that more than one of its ``stages`` holds, in the order of the model."""
    users: dict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(stages):
        for parameter in stage.parameters():
            users[id(parameter)].append(index)
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return tuple(TieGroup(tuple(names[key]), tuple(users[key])) for key in names if len(users[key]) > 1)
