"""What a plan took over from the modules that it took apart: a plan is good for as long as they stay as they were."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

_Path = tuple[str, ...]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_modules", "_parameters", "_buffers")


class InlinedModules:
    """The modules that a plan took apart.

    Args:
        root: The model.
        paths: Paths of modules that were taken apart; those around them were too.
        used: Per stage the paths of modules, parameters and buffers that it calls or reads.
        stages: The modules of the stages.
    """

    def __init__(
        self, root: nn.Module, paths: Iterable[str], used: Sequence[Collection[str]], stages: Sequence[nn.Module]
    ) -> None:
        self._wrapping = {
            path: _wrapping(_module_at(root, path)) for path in {part for path in paths for part in _path_prefixes(path)}
        }
        self._used: list[tuple[nn.Module, dict[_Path, list[str]]]] = []
        for names, stage in zip(used, stages, strict=True):
            self._used.append((stage, {}))
            for target in sorted(names):
                *outer, name = target.split(".")
                if _member(_module_at(root, tuple(outer)), name) is _member(
                    _module_at(stage, tuple(outer)), name
                ):  # no constant of the graph
                    self._used[-1][1].setdefault(tuple(outer), []).append(name)

    def is_wrapped_anew(self, root: nn.Module) -> bool:
        """Whether hooks or wrappers of a module that was taken apart came or went."""
        return any(_wrapping(_module_at(root, path)) != before for path, before in self._wrapping.items())

    def is_replaced(self, root: nn.Module) -> bool:
        """Whether the model has another module, parameter or buffer now than a stage: engines replace them in both."""
        return any(
            _member(held, name) is not _member(holds, name)
            for stage, holders in self._used
            for path, names in holders.items()
            for held, holds in [(_module_at(root, path), _module_at(stage, path))]
            for name in names
        )


def _path_prefixes(path: str) -> Iterator[_Path]:
    names = tuple(path.split(".")) if path else ()
    return (names[:depth] for depth in range(len(names) + 1))


def _module_at(root: nn.Module, path: _Path) -> nn.Module | None:
    module: nn.Module | None = root
    for name in path:
        module = module and module._modules.get(name)
    return module


def _member(module: nn.Module | None, name: str) -> Any:
    state = vars(module) if module is not None else {}
    return next((state[table][name] for table in _TABLES if name in state.get(table, ())), None)


def _wrapping(module: nn.Module | None) -> Any:
    state = vars(module) if module is not None else {}
    return state.get("forward"), [list(state.get(table, ())) for table in _HOOKS]
