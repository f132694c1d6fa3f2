"""What is known of a module's parameters stays with the module when others take their place.

FSDP2 gives a module parameters of its own, and ``load_state_dict(assign=True)`` those of the state; torch's hooks and what is
set on a parameter stay behind with the old ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slapo_core.parameters import facts, successor

from ._torch_autograd import no_functions


class LastingHooks:
    """A hook of a module: before its forward each of its parameters has the hooks that were meant for it."""

    traced = True  # it changes no value

    def __init__(self) -> None:
        self.hooks: dict[str, Callable[[torch.Tensor], Any]] = {}

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # the first run after build is not compiled
            return
        with no_functions():
            for name, hook in self.hooks.items():
                parameter = module._parameters.get(name)
                if parameter is not None and parameter.requires_grad and not _has(parameter, type(hook)):
                    parameter.register_hook(hook)  # type: ignore[no-untyped-call]


def _has(parameter: nn.Parameter, kind: type) -> bool:
    return any(isinstance(hook, kind) for hook in (parameter._backward_hooks or {}).values())


def keep_hook(module: nn.Module, name: str, hook: Callable[[torch.Tensor], Any]) -> None:
    """Whatever tensor becomes the module's parameter of this name gets this hook too; the present one has it."""
    lasting = next((found for found in module._forward_pre_hooks.values() if isinstance(found, LastingHooks)), None)
    if lasting is None:
        lasting = LastingHooks()
        module.register_forward_pre_hook(lasting)
    lasting.hooks[name] = hook


class _LastingFacts:
    """Two hooks of a module around its loading of a state."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor | None] = {}

    def remember(self, module: nn.Module, *args: Any) -> None:
        self.before = {**module._parameters, **module._buffers}

    def put_back(self, module: nn.Module, keys: Any) -> None:
        before, self.before = self.before, {}
        for name, old in before.items():
            table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            new = table.get(name)
            if old is not None and new is not None and new is not old and facts(old).spec is not None:
                table[name] = successor(old, new.detach())


def keep_facts(module: nn.Module) -> None:
    """A part that ``load_state_dict(assign=True)`` puts into the module is known to be one, as the part before it was."""
    lasting = _LastingFacts()
    module.register_load_state_dict_pre_hook(lasting.remember)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(lasting.put_back)  # type: ignore[no-untyped-call]
