"""Tracking of sharded and partial values through the torch functions of a running forward.

What enters is each call of a torch function with its arguments. What leaves is the layout of its results, or
``MixesShards``, with the reason why the function needs other ranks' shards. The room imports ``planning.dry_run``,
``splitting``, ``syncs``, ``rules``, ``communication`` and ``slapo_core``.

``sharded_values`` tracks the outputs of sharded modules, and of syncs that scatter, by DTensor's rules
(``op_rules``). Where these rules refuse, or do not know an operator, a numeric probe decides: random numbers go
through the operation whole and in parts (``numeric_probe``). Partial values are tracked up to the reduction, by the
numeric probe alone. Random draws are compared between ranks (``rng_agreement``). Where the checks are not sure they
stay silent: operators without a rule, uneven shards, one head whose width might be what is sharded.
"""
