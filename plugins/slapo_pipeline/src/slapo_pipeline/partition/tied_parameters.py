"""Tied parameters, which a model registers under several names, and those of them that several stages share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from slapo_core import TieGroup


def analyze_tie_weights(top_mod: nn.Module, is_pipeline_partitioned: bool) -> dict[nn.Parameter, set[tuple[str, int]]]:
    """Find the parameters that are registered under several names, in time linear in the size of the model.

    Args:
        top_mod: The model; when partitioned, a module whose children are the stages, in order.
        is_pipeline_partitioned: Whether the model is partitioned. If not, every stage number is 0.

    Returns:
        Tied parameter to the set of its ``(name, stage)``, with the name inside the stage. For a partitioned model, only
        parameters that several stages hold.
    """
    stages = list(top_mod.children()) if is_pipeline_partitioned else [top_mod]
    first: dict[int, tuple[str, int]] = {}
    tied: dict[nn.Parameter, set[tuple[str, int]]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            place = first.setdefault(id(parameter), (name, index))
            if place != (name, index):
                tied.setdefault(parameter, {place}).add((name, index))
    if not is_pipeline_partitioned:
        return tied
    return {parameter: places for parameter, places in tied.items() if len({index for _, index in places}) > 1}


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
