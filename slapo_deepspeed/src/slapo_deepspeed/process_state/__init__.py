"""State that DeepSpeed keeps once per process: its import, its accelerator, process groups and module-level tables.
In: the program's mesh. Out: the ``deepspeed`` module, an ``mpu`` object for ``deepspeed.initialize``, and functions
that undo what an engine leaves behind. ``_deepspeed_private`` has every private name of DeepSpeed. Lowest room: imports
core and ``slapo_training`` only.
"""
