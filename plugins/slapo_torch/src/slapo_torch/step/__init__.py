"""One training step on this rank: forward and backward of micro-batches, weights of their losses, and the state of
training.

``engine_step`` is the value that the engine passes through a step, with the checks of the first one. ``stage_call`` runs
one stage under the precision of the engine and weighs its loss, and ``gradient_accumulation`` runs the micro-batches of a
model without pipeline. ``local_parameters`` clips and compares gradients across ranks, and ``training_progress`` holds the
learning-rate schedule and the loss scale. Micro-batches and labels enter; a ``StepResult`` and local gradients leave. It
may import ``slapo_core``, ``slapo_training``, ``gradients`` and ``fsdp``.
"""
