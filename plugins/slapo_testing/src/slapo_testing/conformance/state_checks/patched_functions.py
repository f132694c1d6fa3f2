"""Detection of patched functions: those of torch, and the methods of the model's classes."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ._torch_private import hooks_of_all_modules


class Patches:
    """Present functions of torch and of the model's classes.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        classes = {cls for module in model.modules() for cls in type(module).__mro__} - {object}
        owners: list[Any] = [torch, torch.nn.functional, torch.Tensor, *classes]
        self._kept = {owner: {name: value for name, value in vars(owner).items() if _is_callable(value)} for owner in owners}
        self._hooks = {name: dict(table) for name, table in hooks_of_all_modules().items()}

    def differences(self) -> list[str]:
        """Return the names of the functions that have been replaced since."""
        hooks = [name for name, table in hooks_of_all_modules().items() if dict(table) != self._hooks[name]]
        changed = [f"{_name(owner)}.{name}" for owner, name, _ in self._changed_functions()]
        return [*changed, *(f"the hooks of all modules, torch.nn.modules.module.{name}" for name in hooks[:1])]

    def put_back(self) -> None:
        """Restore the functions."""
        for owner, name, value in [*self._changed_functions()]:
            setattr(owner, name, value)
        for name, table in hooks_of_all_modules().items():
            table.clear()
            table.update(self._hooks[name])

    def _changed_functions(self) -> Iterator[tuple[Any, str, Any]]:
        for owner, functions in self._kept.items():
            now = vars(owner)
            yield from ((owner, name, value) for name, value in functions.items() if now.get(name) is not value)


def _is_callable(value: Any) -> bool:
    return (callable(value) and not isinstance(value, type)) or isinstance(value, (staticmethod, classmethod, property))


def _name(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
