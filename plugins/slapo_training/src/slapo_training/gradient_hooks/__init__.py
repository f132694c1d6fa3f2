"""Hooks that users put on parameters of the unmodified model, where parameters are held in parts and batches are cut.

A hook was written for the whole gradient of the whole batch. ``StepHooks`` takes the hooks off a rank's parameters when an
engine is built, and runs them once in a step, on gradients that are reduced and put together. ``move_hooks`` is for a shard
that is trained without an engine. This may import ``slapo_core`` and the modules of ``slapo_training`` beside it.
"""

from ..distributed._torch_private import register_first
from .elementwise_marker import gradient_hook
from .sharded_attributes import shard_attributes
from .sharded_hooks import move_hooks
from .step_hooks import GradientAccess, StepHooks

__all__ = ["GradientAccess", "StepHooks", "move_hooks", "shard_attributes", "gradient_hook", "register_first"]
