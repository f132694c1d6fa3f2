"""The modules that a program's graphs inline; the program is valid until their hooks, wrappers or tensors are replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

_Path = tuple[str, ...]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_modules", "_parameters", "_buffers")


class InlinedModules:
    """The hooks, wrappers, modules and tensors of a model at the time it was cut.

    The modules around the inlined ``paths`` are inlined, too.
    """

    def __init__(
        self, root: nn.Module, paths: Iterable[str], used: Sequence[Collection[str]], stages: Sequence[nn.Module]
    ) -> None:
        inlined = [tuple(path.split(".")) if path else () for path in paths]
        around = {path[:depth] for path in inlined for depth in range(len(path) + 1)}
        self._wrapping = {path: _forward_and_hooks(_module_at(root, path)) for path in around}
        self._used: list[tuple[nn.Module, dict[_Path, list[str]]]] = []
        for names, stage in zip(used, stages, strict=True):
            self._used.append((stage, {}))
            for target in sorted(names):
                *outer, name = target.split(".")
                if _member(_module_at(root, tuple(outer)), name) is _member(
                    _module_at(stage, tuple(outer)), name
                ):  # no constant of the graph
                    self._used[-1][1].setdefault(tuple(outer), []).append(name)

    def wrapping_changed(self, root: nn.Module) -> bool:
        """Return whether an inlined module gained or lost a hook or wrapper."""
        return any(_forward_and_hooks(_module_at(root, path)) != before for path, before in self._wrapping.items())

    def has_replaced_members(self, root: nn.Module) -> bool:
        """Return whether a module, parameter or buffer of the model is no longer the one a stage has.

        An engine replaces a member in both, which is no difference.
        """
        return any(
            _member(held, name) is not _member(holds, name)
            for stage, holders in self._used
            for path, names in holders.items()
            for held, holds in [(_module_at(root, path), _module_at(stage, path))]
            for name in names
        )


def _module_at(root: nn.Module, path: _Path) -> nn.Module | None:
    module: nn.Module | None = root
    for name in path:
        module = module and module._modules.get(name)
    return module


def _member(module: nn.Module | None, name: str) -> Any:
    state = vars(module) if module is not None else {}
    return next((state[table][name] for table in _TABLES if name in state.get(table, ())), None)


def _forward_and_hooks(module: nn.Module | None) -> Any:
    state = vars(module) if module is not None else {}
    return state.get("forward"), [list(state.get(table, ())) for table in _HOOKS]
