"""Hooks of users on parameters of the unmodified model, with sharded parameters and split batches.

A user's hook expects the whole gradient of the whole batch. ``StepHooks`` takes the hooks off a rank's parameters at build, and
runs them once in a step on reduced and gathered gradients. ``move_hooks`` is for shards that are trained without
an engine. It may import ``slapo_core`` and the modules of ``slapo_training`` beside it.
"""

from ..distributed._torch_private import register_first
from .hook_kinds import gradient_hook
from .sharded_hooks import move_hooks, shard_attributes
from .step_hooks import GradientAccess, StepHooks

__all__ = ["GradientAccess", "StepHooks", "move_hooks", "shard_attributes", "gradient_hook", "register_first"]
