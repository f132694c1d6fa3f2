"""The hooks this plugin adds for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from slapo_core.interfaces.hookspecs import hookspec

if TYPE_CHECKING:
    from .planning.execution.layer_backends import LayerBackend
    from .rules.sharding_rule import ShardingRule


@hookspec
def slapo_shard_rules() -> Sequence[ShardingRule | str]:  # type: ignore[empty-body]
    """How modules of your classes are split: each a ``ShardingRule``, asked in order, before those of this plugin.

    Where ``"module:NAME"`` stands for a rule or a list of rules, it is imported when a schedule first shards something. If your
    plugin is of use without ``slapo-sharding`` too, mark the hook ``@hookimpl(optionalhook=True)``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from slapo_sharding import Cut, ShardingRule
        >>> class Scale(nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.width, self.weight = width, nn.Parameter(torch.ones(width))
        ...     def forward(self, x):
        ...         return x.view(-1, self.width) * self.weight
        >>> SCALE = ShardingRule(
        ...     "Scale", lambda module: type(module) is Scale, (Cut({"weight": 0}, "sharded", "sharded", ("width",)),)
        ... )
        >>> @hookimpl
        ... def slapo_shard_rules():
        ...     return [SCALE]
    """


@hookspec
def slapo_layer_backends() -> Mapping[str, LayerBackend | str]:  # type: ignore[empty-body]
    """Engines whose own layers may take the place of split ones: the name for ``tensor_parallel(backend=...)`` to a function.

    With ``parallel_loss=True`` the function is asked for what computes a loss from parts of the logits as well.

    For ``"module:NAME"`` the function is imported when a schedule first asks for it. What it is given and has to return:
    ``slapo_sharding.planning.execution.layer_backends.LayerBackend``.

    Example:
        >>> @hookimpl
        ... def slapo_layer_backends():
        ...     return {"megatron": "slapo_megatron.layers.layer_backend:engine_layer"}
    """
