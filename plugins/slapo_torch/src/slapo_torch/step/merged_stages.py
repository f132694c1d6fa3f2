"""Several stages of one rank as one module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def merge_stages(stages: Sequence[nn.Module]) -> nn.Module:
    """One tree with all parameters, buffers and modules of some stages, under their names in the whole model.

    It is for looking and for switching modes, not for calling: each stage runs for itself. What belongs to one stage is the
    very same object; a module around parts of several stages is a bare module of its own.
    """
    if len(stages) == 1:
        return stages[0]
    tree = nn.Module()
    tree.training = stages[0].training
    for table in ("_parameters", "_buffers"):
        for stage in stages:
            getattr(tree, table).update(getattr(stage, table))
    tree._non_persistent_buffers_set = set().union(*(stage._non_persistent_buffers_set for stage in stages))
    for name in dict.fromkeys(name for stage in stages for name in stage._modules):
        found = {id(child): child for stage in stages if (child := stage._modules.get(name)) is not None}
        tree._modules[name] = merge_stages([*found.values()]) if found else None
    return tree
