"""Comparison of a module on this rank's shards with the same module on whole values, once, at the first run.

What enters is a module that takes and returns whole values, with the arguments of its call. What leaves is nothing,
or a ``BuildError`` that names the line where the two runs part. The room imports ``checks.value_tracking``,
``planning.execution``, ``planning.local_sizes``, ``splitting``, ``syncs``, ``rules``, ``communication`` and
``slapo_core``.

The comparison finds what DTensor's rules cannot see. The innermost module with whole inputs and outputs runs again as
it did, and again with the outputs of its sharded layers gathered (``module_rerun``), its attributes as they were at
``create_schedule`` (``original_sizes``). Where results differ, ``call_records`` finds the line. Modules of a derived
plan, which a trace has verified, are not run again.
"""
