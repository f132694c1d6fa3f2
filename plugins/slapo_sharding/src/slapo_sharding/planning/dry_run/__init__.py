"""A dry run of a traced graph with DTensors as types, without data and without communication.

What enters is a traced graph and a split for some of its layers. What leaves is ``Layouts``: for each node whether
its value is replicated, sharded or partial (``layout_records``), or a ``LayoutError`` at the first operation that would
have to move data.
The room imports ``splitting`` for module paths, ``syncs`` for norms over a sharded dimension, ``rules``,
``communication`` and ``slapo_core``; the first-run checks use it as well.

DTensor's own rules propagate the layouts. ``layout_adaptation`` handles whole values that meet sharded ones: they are
cut, and their gradients summed, where the caller allows it. ``split_specs`` reads from the graph the parts that a
model takes out of a fused projection, and ``fused_outputs`` propagates these parts. ``parallel_branches`` finds
branches joined by ``cat`` or ``stack``, such as heads in a list, that ranks can run one each. An
``autograd.Function`` of the model, or an operator without a DTensor rule, is run on random shards, forward and
backward (``function_probe``).
"""
