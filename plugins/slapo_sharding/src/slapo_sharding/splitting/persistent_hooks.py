"""Facts and hooks of parameters, which the module moves to the parameters that replace them.

FSDP2 gives a module new parameters, and ``load_state_dict(assign=True)`` gives it those of the state. Torch's hooks and
attributes stay with the old parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from slapo_core import ParameterFacts, Schedule, parameter_facts
from slapo_training.gradient_hooks import register_first

from ..communication._torch_autograd import no_functions
from ..rules.sharding_rule import tensor_of
from ..syncs.sync_hooks import GradientReductionHook


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


def keep_sum(schedule: Schedule, module: nn.Module, name: str) -> None:
    """Reduce the gradient of a replicated parameter, in the module or below it, which was verified to be partial."""
    label = f"{schedule.path}.{name}" if schedule.path else name
    reduction, parameter = GradientReductionHook(schedule.group, label, seen=True), tensor_of(module, name)
    reduction.by_plan = True
    if parameter is not None and parameter.requires_grad:
        schedule.on_undo(register_first(parameter, reduction).remove)
    keep_hook(schedule, module, name, reduction)


class _FactsAfterLoad:
    """Hook that runs after a module has loaded a state, and moves the facts of shards to new tensors.

    Args:
        known: Facts of the module's shards, by name.
    """

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
