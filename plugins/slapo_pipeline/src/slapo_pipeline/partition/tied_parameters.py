"""Tied parameters: parameters that a model registers under several names."""

from __future__ import annotations

from torch import nn


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
