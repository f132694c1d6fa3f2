"""Parameters that a model holds at several places, and those that several pipeline stages share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from .program import TieGroup


def analyze_tie_weights(top_mod: nn.Module, is_pipeline_partitioned: bool) -> dict[nn.Parameter, set[tuple[str, int]]]:
    """Find the parameters that are registered at several places. Linear in the size of the model.

    Args:
        top_mod: The model; when partitioned, a module whose children are the stages, in order.
        is_pipeline_partitioned: Whether it is. If not, every stage number is 0.

    Returns:
        Tied parameter to the set of its ``(name, stage)``; the name is the one inside of the stage.
    """
    stages = list(top_mod.children()) if is_pipeline_partitioned else [top_mod]
    places: dict[nn.Parameter, set[tuple[str, int]]] = defaultdict(set)
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            places[parameter].add((name, index))
    return {parameter: names for parameter, names in places.items() if len(names) > 1}


def tie_groups(module: nn.Module, stages: Sequence[nn.Module]) -> tuple[TieGroup, ...]:
    """The parameters of ``module`` that more than one of its ``stages`` uses, in the order of the model."""
    users: dict[nn.Parameter, list[int]] = defaultdict(list)
    for index, stage in enumerate(stages):
        for parameter in stage.parameters():
            users[parameter].append(index)
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return tuple(TieGroup(tuple(names[parameter]), tuple(users[parameter])) for parameter in names if len(users[parameter]) > 1)
