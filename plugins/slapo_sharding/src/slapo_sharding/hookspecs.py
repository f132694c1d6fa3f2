"""The hooks this plugin adds for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from slapo_core import hookspec

if TYPE_CHECKING:
    from .planning.execution.layer_backends import LayerBackend
    from .rules.sharding_rule import ShardingRule


@hookspec
def slapo_shard_rules() -> Sequence[ShardingRule | str]:  # type: ignore[empty-body]
    """Return one ``ShardingRule`` for each kind of module of yours; they are asked in order, before those of this plugin.

    ``"module:NAME"`` stands for a rule or a list of rules, which is imported when a schedule first shards something. If your
    plugin is useful without ``slapo-sharding`` too, mark the hook ``@hookimpl(optionalhook=True)``.

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
    """Return the engines whose own layers may replace sharded ones: name in ``tensor_parallel(backend=...)`` to function.

    With ``parallel_loss=True`` the function is also asked for a module that computes the loss from sharded logits.

    ``"module:NAME"`` is imported when a schedule first asks for it. The function's arguments and result are those of
    ``slapo_sharding.LayerBackend``.

    Example:
        >>> @hookimpl
        ... def slapo_layer_backends():
        ...     return {"megatron": "slapo_megatron.layer_backend:engine_layer"}
    """
