"""Hooks of a whole parameter on its shard, for backwards without an engine."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from contextlib import AbstractContextManager

import torch
from torch import nn

from slapo_core import ShardSpec

from ..distributed.full_tensors import gather_parts
from .elementwise_marker import is_elementwise
from .hook_tables import TABLES, Hook, HookRef, is_user_hook, put_table, table_of
from .whole_parameter import Place, whole_parameter


class ShardedHook:
    """User's hook on a shard, called with the whole gradient of each backward. Collective over the ranks of the shards.

    Copies of the parameter have no hooks, as torch does not copy them. ``places`` are the modules and names under which the
    model holds the shard.
    """

    def __init__(self, ref: HookRef, whole: torch.Tensor, part: torch.Tensor, spec: ShardSpec, places: list[Place]) -> None:
        self.ref, self.origin = ref, weakref.ref(whole)
        self._part, self._spec, self._places = weakref.ref(part), spec, places

    def _whole(self, part: torch.Tensor) -> AbstractContextManager[nn.Parameter]:
        places = [(module, name) for module, name in self._places if module._parameters.get(name) is part]
        return whole_parameter(part, self._spec, self.origin, places, in_place=False)

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        hook, part = self.ref.hook, self._part()
        if hook is None or gradient is None:
            return None
        if is_elementwise(hook):
            return _run_hook(hook, gradient)
        whole = gather_parts(gradient, self._spec)
        if part is None:  # another tensor replaced the shard
            return self._spec.local(_run_hook(hook, whole))
        with self._whole(part):
            return self._spec.local(_run_hook(hook, whole))


class ShardedPostAccumulateHook(ShardedHook):
    """User's post-accumulate hook on a shard."""

    def __call__(self, part: torch.Tensor | None) -> None:
        hook = self.ref.hook
        if hook is None or part is None or part.grad is None:
            return
        if is_elementwise(hook):
            hook(part)
            return
        gradient = gather_parts(part.grad, self._spec)
        with self._whole(part) as whole:
            before, whole.grad = whole.grad, gradient
            hook(whole)
            gradient, whole.grad = whole.grad, before
        if gradient is None:
            part.grad = None
        else:
            part.grad.copy_(self._spec.local(gradient))


def move_hooks(part: torch.Tensor, whole: torch.Tensor, spec: ShardSpec, places: list[Place]) -> None:
    """Wrap the user's hooks of a whole parameter, which do not change, for its shard, in new tables of the shard."""
    for name, kind in zip(TABLES, (ShardedHook, ShardedPostAccumulateHook), strict=True):
        table = table_of(whole, name)
        if table:
            carried = {
                key: kind(HookRef(table, key), whole, part, spec, places) if is_user_hook(hook) else hook
                for key, hook in table.items()
            }
            put_table(part, name, OrderedDict(carried))


def _run_hook(hook: Hook, gradient: torch.Tensor) -> torch.Tensor:
    result = hook(gradient)
    return gradient if result is None else result
