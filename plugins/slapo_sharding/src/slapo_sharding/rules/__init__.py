"""Sharding rules: the ways in which ``shard`` may split the parameters of each module class.

What enters is a module. What leaves is a ``ShardingRule`` with its ``Cut``s: which dimension of each parameter is
split, and whether the module's input and output are then replicated, sharded or partial. ``rulebook`` finds the rule
of a module among those of all plugins. Projections and parametrized layers have rules that are derived by a numeric
probe on random inputs. The record of a cut that was made (``AppliedCut``) is here too. The room imports
``communication``, ``slapo_core`` and ``slapo_training``.
"""

from .rulebook import rule_of
from .sharding_rule import Cut, ShardingRule

__all__ = ["Cut", "ShardingRule", "rule_of"]
