"""Derivation of a tensor-parallel plan from the traced graph of a model.

What enters is a schedule handle whose model can be traced. What leaves is a ``DerivedPlan``: the layers that are
split and how, the modules that stay whole with the reason, and the modules that need a local forward. Nothing is
changed. The room imports ``planning.local_sizes``, ``planning.sequence``, ``planning.dry_run``, ``splitting``,
``syncs``, ``rules``, ``communication`` and ``slapo_core``.

``layer_search`` splits every layer along its output and retreats where the dry run meets an operation that would have
to move data. Where a retreat can leave either side whole, the one with fewer parameters gives way: the first matrix
of an adapter, not the layer beside it. Convolutions that make the values between blocks stay whole
(``residual_streams``). A whole parameter that is used on sharded and on whole values has each sharded use summed in
the graph (``mixed_parameters``). ``plan_search`` compares variants of the plan: with cut whole values, with branches
distributed to ranks, and, where the ranks do not divide the key heads, with attention traced as if each copy of a head
were a head (``replicated_key_heads``). Embeddings and heads that the model does not name are found in the graph once
the plan stands (``vocabulary``). ``replicated_modules`` logs which modules stay whole on every rank, and why.
"""
