"""``register_shard_method``: decorator for sharding rules of this process. Plugins use the hook ``slapo_shard_rules``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from torch import nn

from slapo_core import default_registry

from .rulebook import add_rule
from .sharding_rule import Cut, ShardingRule, computes_as


class ShardMethod:
    """Base class for the ways to split a module class; ``register_shard_method`` registers a subclass.

    Attributes:
        cuts: The ways to split such a module.
    """

    cuts: ClassVar[tuple[Cut, ...]] = ()

    @staticmethod
    def refuse(module: nn.Module, cut: Cut) -> str | None:
        """Say why a cut of this module would be wrong, or None."""
        return None


Method = TypeVar("Method", bound=type[ShardMethod])


def register_shard_method(module_cls: type[nn.Module] | None) -> Callable[[Method], Method]:
    """Return a class decorator that lets ``shard`` split modules of a class in this process.

    The method comes before the rules of plugins. Registering a module class again replaces its method. Subclasses that keep
    the class's forward are split, too.

    Args:
        module_cls: A class of modules; None, for one that could not be imported, registers nothing.

    Raises:
        PluginError: the decorated class is no valid method.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class Scale(nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.width, self.weight = width, nn.Parameter(torch.ones(width))
        ...     def forward(self, x):
        ...         return x.view(-1, self.width) * self.weight
        >>> @register_shard_method(Scale)
        ... class ShardScale(ShardMethod):
        ...     cuts = (Cut({"weight": 0}, "sharded", "sharded", ("width",)),)
    """

    def register(method: Method) -> Method:
        if module_cls is not None:
            rule: Any = method
            if isinstance(method, type) and issubclass(method, ShardMethod):
                matches = lambda module: computes_as(module, module_cls)  # noqa: E731
                rule = ShardingRule(module_cls.__name__, matches, method.cuts, method.refuse)
            add_rule(default_registry(), module_cls, rule, f"{method.__module__}.{method.__qualname__}")
        return method

    return register
