"""Facts and hooks of a module's parameters, kept with the module when other parameters take their places.

FSDP2 gives a module parameters of its own, and ``load_state_dict(assign=True)`` those of the state; torch's hooks and what is
set on a parameter stay behind with the old ones.
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
    """A hook of a module: before its forward the parameter of this name has the hook that was meant for it.

    A module that tracing dissolves is no longer called: only the parameter it has then has the hook.

    Args:
        name: Of the parameter, in the module or as a path below it.
        hook: For ``Tensor.register_hook``.
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
    """Whatever tensor becomes the module's parameter of this name gets this hook too; the present one has it."""
    lasting = PersistentHook(name, hook)
    module.register_forward_pre_hook(lasting)
    schedule.on_undo(partial(lasting.drop, module))


def keep_sum(schedule: Schedule, module: nn.Module, name: str) -> None:
    """Sum the gradient of a whole parameter, in the module or below it: each rank has a part of it, as was shown."""
    label = f"{schedule.path}.{name}" if schedule.path else name
    total, parameter = GradientReductionHook(schedule.group, label, seen=True), tensor_of(module, name)
    total.by_plan = True
    if parameter is not None and parameter.requires_grad:
        schedule.on_undo(register_first(parameter, total).remove)
    keep_hook(schedule, module, name, total)


class _FactsAfterLoad:
    """A hook of a module behind its loading of a state.

    Args:
        known: What is known of its parts, by name.
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
    """A part that ``load_state_dict(assign=True)`` puts into the module is known to be one, as the part before it was."""
    own = {**module._parameters, **module._buffers}
    known = {
        name: parameter_facts(tensor)
        for name, tensor in own.items()
        if tensor is not None and parameter_facts(tensor).spec is not None
    }
    module.register_load_state_dict_post_hook(_FactsAfterLoad(known))  # type: ignore[no-untyped-call]
