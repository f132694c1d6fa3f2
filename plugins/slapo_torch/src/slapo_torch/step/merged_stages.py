"""Several stages of one rank as one module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def merge_stages(stages: Sequence[nn.Module]) -> nn.Module:
    """Return one tree with all parameters, buffers and modules of some stages, under their names in the whole model.

    The tree is for traversal and for switching modes; it cannot be called. Modules of one stage are the same objects; a parent
    of modules of several stages is a new bare ``nn.Module``.
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
