"""State that Megatron-Core keeps once per process: ``parallel_state`` with its process groups, and the CPU mode for
tests. In: the program's mesh. Out: Megatron's ``ProcessGroupCollection`` and context managers around calls of
Megatron. ``_megatron_private`` has every private name of Megatron. Lowest room: imports core and ``slapo_training``
only.
"""
