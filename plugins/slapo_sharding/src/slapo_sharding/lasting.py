"""What is known of a module's parameters stays with the module when others take their place.

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

from slapo_core.parameters import facts
from slapo_core.schedule import Schedule

from ._torch_autograd import no_functions
from .rules import tensor_of


class LastingHook:
    """A hook of a module: before its forward the parameter of this name has the hook that was meant for it.

    A module that tracing dissolves is no longer called: only the parameter it has then has the hook.

    Args:
        name: Of the parameter, in the module.
        hook: For ``Tensor.register_hook``.
    """

    traced = True  # it changes no value

    def __init__(self, name: str, hook: Callable[[torch.Tensor], Any]) -> None:
        self.name, self.hook = name, hook

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # the first run after build is not compiled
            return
        with no_functions():
            parameter = module._parameters.get(self.name)
            if parameter is None or not parameter.requires_grad:
                return
            if not any(isinstance(other, type(self.hook)) for other in (parameter._backward_hooks or {}).values()):
                parameter.register_hook(self.hook)  # type: ignore[no-untyped-call]

    def drop(self, module: nn.Module) -> None:
        """Take the hook off the parameter that the module has now."""
        hooks: Any = getattr(module._parameters.get(self.name), "_backward_hooks", None) or {}
        for key in [key for key, hook in hooks.items() if hook is self.hook]:
            del hooks[key]


def keep_hook(schedule: Schedule, module: nn.Module, name: str, hook: Callable[[torch.Tensor], Any]) -> None:
    """Whatever tensor becomes the module's parameter of this name gets this hook too; the present one has it."""
    lasting = LastingHook(name, hook)
    module.register_forward_pre_hook(lasting)
    schedule.on_undo(partial(lasting.drop, module))


class _LastingFacts:
    """Two hooks of a module around its loading of a state."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor | None] = {}

    def remember(self, module: nn.Module, *args: Any) -> None:
        self.before = {**module._parameters, **module._buffers}

    def put_back(self, module: nn.Module, keys: Any) -> None:
        before, self.before = self.before, {}
        for name, old in before.items():
            new = tensor_of(module, name)
            if old is not None and new is not None and new is not old and facts(old).spec is not None:
                vars(facts(new)).update(vars(replace(facts(old), tags=set(facts(old).tags))))


def keep_facts(module: nn.Module) -> None:
    """A part that ``load_state_dict(assign=True)`` puts into the module is known to be one, as the part before it was."""
    lasting = _LastingFacts()
    module.register_load_state_dict_pre_hook(lasting.remember)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(lasting.put_back)  # type: ignore[no-untyped-call]
