"""Modules that a model chooses from by name, as the adapters of a projection: one that ran stands for the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from .flat_graphs import called_paths
from .layouts import Layouts
from .local_sizes.owners import is_inside


def unseen_choices(root: nn.Module, layouts: Layouts, path: str) -> Iterator[str]:
    """Yield the paths of the modules of the same class in an ``nn.ModuleDict`` that no example input ran.

    Args:
        root: The model.
        layouts: The dry run of what the example inputs ran.
        path: Of a module that ran.
    """
    owner, _, name = path.rpartition(".")
    table = root.get_submodule(owner)
    if path and isinstance(table, nn.ModuleDict):
        called = called_paths(layouts.graph)
        for other, module in table.items():
            if type(module) is type(table[name]) and not _ran(f"{owner}.{other}", called):
                yield f"{owner}.{other}"


def _ran(path: str, called: Collection[str]) -> bool:
    return any(is_inside(each, path) for each in called)
