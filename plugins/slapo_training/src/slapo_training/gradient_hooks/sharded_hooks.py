"""Hooks of a whole parameter on its shard, for backwards without an engine.

Torch's tables of hooks are moved to the shard. While a hook runs, the whole parameter is in the place of the shard, with its
tensor attributes, e.g. a mask, which are otherwise sharded like it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core import ShardSpec, parameter_facts

from ..distributed.full_tensors import gather_parts
from ..distributed.gradients import plain
from .hook_kinds import is_elementwise

CUT = "_slapo_cut_attributes"
"""Attribute of a shard with the names of its attributes that were sharded with it."""


def shard_attributes(
    part: torch.Tensor, shape: Sequence[int], dim: int, cut: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Shard the tensor attributes of a parameter's shard in place; return the whole tensors by name.

    Args:
        part: The shard, with the attributes of the whole parameter.
        shape: Shape of the whole parameter. A tensor matches if each of its sizes is the same or 1.
        dim: Sharded dimension; tensors of size 1 along it do not change.
    """
    found = {
        name: value for name, value in vars(part).items() if is_shaped_like(value, shape) and value.shape[dim] == shape[dim]
    }
    vars(part).update({name: cut(value.detach()) for name, value in found.items()})
    if found:
        vars(part)[CUT] = {*vars(part).get(CUT, ()), *found}
    return found


def attributes_cut_with(part: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensor attributes that were sharded with a shard, by name, each expanded to the shard's shape."""
    own = vars(part)
    tensors = {name: own.get(name) for name in sorted(own.get(CUT, ()))}  # users may have replaced an attribute
    return {name: value.expand(part.shape) for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def is_shaped_like(value: object, shape: Sequence[int]) -> bool:
    """Return True for a tensor of a parameter's shape, or with size 1 along some dimensions."""
    if type(value) is not torch.Tensor or value.dim() != len(shape) or not shape:
        return False
    return all(own in (1, size) for own, size in zip(value.shape, shape, strict=True))


Place = tuple[nn.Module, str]
Origin = Callable[[], torch.Tensor | None]
"""Function that returns the whole parameter of a shard while it is alive, or None."""


@contextmanager
def whole_parameter(
    part: torch.Tensor, spec: ShardSpec, origin: Origin, places: Sequence[Place], *, in_place: bool
) -> Iterator[nn.Parameter]:
    """Context in which the model has a whole parameter instead of a shard. Collective over the ranks of the shards.

    The whole parameter is that of the unmodified model while it is alive, since a hook may have closed over it. Changed values
    are copied to the shard.

    Args:
        origin: Returns the parameter of the unmodified model.
        in_place: True to leave the gathered values in the parameter of the unmodified model; False to restore its old values.
    """
    local = plain(part)
    assert local is not None
    values = gather_parts(local, spec)
    found = origin()
    if isinstance(found, nn.Parameter) and found.shape == values.shape and not found.is_meta:
        whole, before = found, found.data
        if in_place and (before.dtype, before.device) == (values.dtype, values.device):
            values = before.copy_(values)  # updates views of the parameter as well
    else:
        whole = _stand_in(part, values, spec)
        before = values
    whole.data = values
    for module, name in places:
        module._parameters[name] = whole
    try:
        yield whole
    finally:
        for module, name in places:
            module._parameters[name] = part  # type: ignore[assignment]
        values, whole.data = whole.data, values if in_place else before
    changed = spec.local(values)
    if not torch.equal(changed, local):
        with torch.no_grad():
            local.copy_(changed)


def _stand_in(part: torch.Tensor, values: torch.Tensor, spec: ShardSpec) -> nn.Parameter:
    """Return a parameter with these values and the attributes of the whole parameter."""
    whole = nn.Parameter(values, requires_grad=part.requires_grad)
    vars(whole).update(vars(part))
    vars(whole).update({name: gather_parts(value, spec) for name, value in attributes_cut_with(part).items()})
    vars(whole).pop(CUT, None)
    whole.__dict__.pop("_slapo_facts", None)
    parameter_facts(whole).names = parameter_facts(part).names
    return whole


TENSOR_HOOKS, POST_HOOKS = TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Hooks of ``register_hook``, and of ``register_post_accumulate_grad_hook``."""

Hook = Callable[[Any], Any]
Table = dict[int, Hook]


class HookRef(NamedTuple):
    """Reference to a hook in the table of the user's parameter that the user's handle removes it from."""

    table: Table
    key: int

    @property
    def hook(self) -> Hook | None:
        """The hook, or None if the user removed it."""
        return self.table.get(self.key)


def table_of(parameter: torch.Tensor, name: str) -> Table:
    return getattr(parameter, name, None) or {}


def put_table(parameter: torch.Tensor, name: str, hooks: Table) -> None:
    """Replace a parameter's table; handles of the old table still remove hooks from the old one."""
    setattr(parameter, name, hooks if isinstance(hooks, OrderedDict) else OrderedDict(hooks))


def is_user_hook(hook: Hook) -> bool:
    """Return True for a user's hook; hooks of the schedule, which sum gradients, have ``of_schedule``."""
    return not getattr(hook, "of_schedule", False)


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
