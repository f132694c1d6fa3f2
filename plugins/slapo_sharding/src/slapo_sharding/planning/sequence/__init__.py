"""Sequence parallelism: where the sequence dimension is scattered and gathered between the layers of a model.

What enters is a graph that was traced with marks at the boundaries of modules (``module_boundaries``), and the
layouts of a dry run. What leaves is a ``SequencePlan`` of scatters and gathers, or ``SequenceSplitError``. The room imports
``planning.dry_run``, ``splitting``, ``syncs`` and ``slapo_core``.

``sequence_search`` scatters what enters the repeated layers, and gathers, at the best boundary, each value that the
dry run (``sequence_layouts``) finds an operation to need whole. That dry run also tracks whole values with a partial
gradient: they come out of a gather whose backward is a reduce-scatter, and must end in sharded layers.
"""
