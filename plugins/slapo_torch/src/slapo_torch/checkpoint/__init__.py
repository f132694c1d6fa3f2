"""Saving and loading of a ``TorchEngine``, exactly on the same layout and with the same losses on any other.

``saver`` writes and ``loader`` reads; the other modules collect and restore model state and optimizer state. An engine's
``CheckpointState`` enters; a checkpoint folder of ``slapo_training.checkpoint`` or the loaded state leaves. It may import
``slapo_core``, ``slapo_tracing``, ``slapo_training``, ``step`` and ``fsdp``.

Optimizer state with one value per parameter element is stored like the parameter. Scalars, parameter groups and the
rest are plain data, stored once, together with differences between ranks (``optimizer_state``). A rank's own data,
such as random states, is in one file per rank and is read on the same layout alone. On any other layout, options
follow parameters: two parameters that one saved rank and one loading rank both hold must share a group in both or in
neither. A learning-rate schedule comes from a rank that had the same groups in the same order (``optimizer_loading``).
"""
