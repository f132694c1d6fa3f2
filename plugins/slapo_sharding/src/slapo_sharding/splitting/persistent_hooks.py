"""Facts of parameters and hooks that reduce their gradients, which the module moves to the parameters that replace them.

FSDP2 gives a module new parameters, and ``load_state_dict(assign=True)`` gives it those of the state. Torch's hooks and
attributes stay with the old parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from slapo_core import ParameterFacts, Schedule, ScheduleError, ShardSpec, parameter_facts, paths
from slapo_tracing.nodes import has_values
from slapo_training.gradient_hooks import register_first

from ..communication import collectives
from ..communication._torch_autograd import no_functions
from ..rules.sharding_rule import tensor_of


class PersistentHook:
    """Forward pre-hook of a module that puts a tensor hook on the present parameter of this name, if it lacks the hook.

    A module that a trace inlines is no longer called: then only its present parameter has the tensor hook.

    Args:
        name: Name of the parameter in the module, or a path below it.
        hook: Hook for ``Tensor.register_hook``.
    """

    traced = True  # it changes no value

    def __init__(self, name: str, hook: Callable[[torch.Tensor], Any]) -> None:
        self.name, self.hook = name, hook

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # the first run after build is not compiled
            return
        with no_functions():
            parameter = tensor_of(module, self.name)
            if parameter is None or not parameter.requires_grad:
                return
            if not any(isinstance(other, type(self.hook)) for other in (parameter._backward_hooks or {}).values()):
                register_first(parameter, self.hook)

    def drop(self, module: nn.Module) -> None:
        """Take the hook off the parameter that the module has now."""
        hooks: Any = getattr(tensor_of(module, self.name), "_backward_hooks", None) or {}
        for key in [key for key, hook in hooks.items() if hook is self.hook]:
            del hooks[key]


def keep_hook(schedule: Schedule, module: nn.Module, name: str, hook: Callable[[torch.Tensor], Any]) -> None:
    """Put the hook, which the present parameter has, on every later parameter of this name."""
    persistent = PersistentHook(name, hook)
    module.register_forward_pre_hook(persistent)
    schedule.on_undo(partial(persistent.drop, module))


def reduce_gradient(schedule: Schedule, module: nn.Module, name: str, *, seen: bool, by_plan: bool = False) -> None:
    """Reduce the partial gradient of a replicated parameter, in the module or below it; see ``GradientReductionHook``."""
    reduction, parameter = (
        GradientReductionHook(schedule.group, paths.join(schedule.path, name), seen=seen),
        tensor_of(module, name),
    )
    reduction.by_plan = by_plan
    if parameter is not None and parameter.requires_grad:
        schedule.on_undo(register_first(parameter, reduction).remove)
    keep_hook(schedule, module, name, reduction)


class GradientReductionHook:
    """Hook of a parameter that all-reduces each micro-batch's gradient over the group.

    Args:
        group: The ranks that each have a partial gradient.
        name: Name of the parameter, for the error if the gradient is replicated already.
        seen: True if the gradient is known to be partial, so that equal values on all ranks are no error.
    """

    of_schedule = True  # tells engines that it is not a hook of the user's
    by_plan = False
    """True if a verified plan added the hook."""

    def __init__(self, group: collectives.Group, name: str, *, seen: bool = False) -> None:
        self.group, self.name, self.seen = group, name, seen

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReductionHook:
        return GradientReductionHook(self.group, self.name, seen=self.seen)

    def __call__(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:  # a backward may reach the parameter without a gradient for it
            return None
        total = collectives.all_reduce(grad, self.group)
        if not self.seen and not torch.compiler.is_compiling() and has_values(grad):  # an estimate's gradients have none
            self._check(grad, total)
        return total

    def _check(self, grad: torch.Tensor, total: torch.Tensor) -> None:
        """Raise ``ScheduleError`` for a gradient of several numbers that is the same on all ranks: it is not partial."""
        is_comparable = grad.numel() * grad.element_size() >= _MIN_BYTES_TO_COMPARE and bool(grad.any())
        self.seen = is_comparable
        ranks = collectives.num_ranks(self.group)
        if is_comparable and torch.allclose(total, grad * ranks, rtol=torch.finfo(grad.dtype).eps, atol=0):
            raise ScheduleError(
                f"the gradient of {self.name!r} is the same on every rank, so it is whole already and its sum would be "
                f"{ranks} times too large; leave sync('grad', 'all_reduce') out",
                primitive="sync",
            )


_MIN_BYTES_TO_COMPARE = 8


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the module's own parameters that need a gradient, by name."""
    return {name: parameter for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad}


def mark_gradients_verified(module: nn.Module) -> None:
    """Record that the gradients of the module's own parameters are partial, even if they are equal on all ranks."""
    for parameter in trainable(module).values():
        for hook in (parameter._backward_hooks or {}).values():
            if isinstance(hook, GradientReductionHook):
                hook.seen = hook.by_plan = True


def reduces_gradient(parameter: torch.Tensor, by_plan: bool = False) -> bool:
    """Return whether a sync, or with ``by_plan`` one of a verified plan, reduces a parameter's gradient over the group."""
    hooks = (parameter._backward_hooks or {}).values()
    return any(isinstance(hook, GradientReductionHook) and (hook.by_plan or not by_plan) for hook in hooks)


class _FactsAfterLoad:
    """Hook that runs after a module has loaded a state, and moves the facts of shards, by name, to new tensors."""

    def __init__(self, known: dict[str, ParameterFacts]) -> None:
        self.known = known

    def __deepcopy__(self, memo: Any) -> _FactsAfterLoad:
        return _FactsAfterLoad(dict(self.known))

    def __call__(self, module: nn.Module, keys: Any) -> None:
        for name, known in self.known.items():
            new = tensor_of(module, name)
            if new is not None and parameter_facts(new).spec is None:
                vars(parameter_facts(new)).update(vars(replace(known, tags=set(known.tags))))
                self.known[name] = parameter_facts(new)


def keep_facts(module: nn.Module) -> None:
    """Keep the facts of the module's shards when ``load_state_dict(assign=True)`` replaces them."""
    own = {**module._parameters, **module._buffers}
    facts = {name: parameter_facts(tensor) for name, tensor in own.items() if tensor is not None}
    known = {name: each for name, each in facts.items() if each.spec is not None}
    module.register_load_state_dict_post_hook(_FactsAfterLoad(known))  # type: ignore[no-untyped-call]


class PieceReductionHook:
    """Hook of a parameter that sums each micro-batch's gradient over all copies of a piece, on this rank as well.

    Only the range from the first to the last replicated piece is sent: the keys and values of a fused projection.
    """

    of_schedule = True  # tells engines that it is not a hook of the user's

    def __init__(self, spec: ShardSpec) -> None:
        self.spec = spec
        held = torch.zeros(spec.full_shape[spec.dim], dtype=torch.int64)
        for start, stop in (part for rank in range(spec.num_shards) for part in spec.ranges(rank)):
            held[start:stop] += 1
        copied = (held > 1).nonzero()
        self.start, self.stop = int(copied[0]), int(copied[-1]) + 1

    def __deepcopy__(self, memo: dict[int, Any]) -> PieceReductionHook:
        return self

    def __call__(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:
            return None
        dim, places = self.spec.dim, list(self._piece_ranges())
        shape = [*grad.shape[:dim], self.stop - self.start, *grad.shape[dim + 1 :]]
        total = grad.new_zeros(shape)
        for own, common, size in places:
            total.narrow(dim, common, size).add_(grad.narrow(dim, own, size))
        total, summed = collectives.all_reduce(total, self.spec.group), grad.clone()
        for own, common, size in places:
            summed.narrow(dim, own, size).copy_(total.narrow(dim, common, size))
        return summed

    def _piece_ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield the start on this rank, the start in the message, and the size of each piece."""
        offset = 0
        for start, stop in self.spec.ranges():
            low, high = max(start, self.start), min(stop, self.stop)
            if low < high:
                yield offset + low - start, low - self.start, high - low
            offset += stop - start


def reduce_replicated_pieces(parameter: nn.Parameter, spec: ShardSpec) -> PieceReductionHook:
    """Register the hook that reduces the gradients of replicated pieces, also for a frozen parameter, and return it."""
    frozen, hook = not parameter.requires_grad, PieceReductionHook(spec)
    parameter.requires_grad_(True)  # torch accepts hooks only on tensors that require a gradient
    register_first(parameter, hook)
    parameter.requires_grad_(not frozen)
    return hook


def has_replicated_pieces(spec: ShardSpec) -> bool:
    """Return whether ranks hold a piece of the parameter more than once."""
    return spec.uneven_ranges is not None and sum(spec.sizes) > spec.full_shape[spec.dim]
