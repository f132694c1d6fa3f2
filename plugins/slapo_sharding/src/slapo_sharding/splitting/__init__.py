"""One shard step: its validation, the split itself, and the facts that stay with a split parameter.

What enters is a schedule handle, a parameter name and a dimension. ``shard_planner`` checks the step and returns a
``ShardStep`` without changing anything; ``shard_step`` applies it. What leaves is a module whose parameters are
this rank's shards, with ties, hooks and facts kept. Attention heads are never split (``attention_heads``); pieces
that several ranks hold reduce their gradients (``persistent_hooks``). The room imports ``syncs``, ``rules``,
``communication``, ``slapo_core`` and ``slapo_training``.
"""
