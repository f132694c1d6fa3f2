"""Parameters, gradients and optimizer states sharded over replicas with FSDP2 (``data_parallel="fsdp"``).

``wrap_policy`` groups parameters into units, ``unit`` gathers and reduces one unit, ``unit_runtime`` runs the units
of a model in order, and ``sharded_replicas`` is the interface to the engine. ``replica_spec`` describes the rows of a
rank. Whole parameters of a replica enter; rows of them leave. It may import ``slapo_core``, ``slapo_training`` and
``gradients``. ``__init__.py`` imports nothing, since ``torch.distributed.fsdp`` takes a second to import.
"""
