"""Parameters that a model holds at several places, and those that several pipeline stages share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

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
    first: dict[int, tuple[str, int]] = {}
    tied: dict[nn.Parameter, set[tuple[str, int]]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in _every_place(stage, ""):
            place = first.setdefault(id(parameter), (name, index))
            if place != (name, index):
                tied.setdefault(parameter, {place}).add((name, index))
    return tied


def tie_groups(module: nn.Module, stages: Sequence[nn.Module]) -> tuple[TieGroup, ...]:
    """The parameters of ``module`` that more than one of its ``stages`` uses, in the order of the model."""
    users: dict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(stages):
        for parameter in stage.parameters():
            users[id(parameter)].append(index)
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in _every_place(module, ""):
        names[id(parameter)].append(name)
    return tuple(TieGroup(tuple(names[key]), tuple(users[key])) for key in names if len(users[key]) > 1)


def _every_place(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Every place that holds a parameter, also the second and later ones of a tie."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _every_place(child, f"{prefix}{name}.")
