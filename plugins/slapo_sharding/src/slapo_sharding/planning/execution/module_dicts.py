"""Entries of an ``nn.ModuleDict``, from which a model chooses by name, as from the adapters of a projection."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..derivation.flat_graphs import called_paths
from ..dry_run.layouts import Layouts
from ..local_sizes.adapted_modules import is_inside


def unused_entries(root: nn.Module, layouts: Layouts, path: str) -> Iterator[str]:
    """Yield the paths of the entries beside a module that ran, of the same class, which did not: it stands for them.

    Args:
        root: The model.
        layouts: The dry run of what the example inputs ran.
        path: Of a module that ran. Only one in an ``nn.ModuleDict`` has such entries.
    """
    owner, _, name = path.rpartition(".")
    table = root.get_submodule(owner)
    if path and isinstance(table, nn.ModuleDict):
        called = called_paths(layouts.graph)
        for other, module in table.items():
            has_run = any(is_inside(each, f"{owner}.{other}") for each in called)
            if type(module) is type(table[name]) and not has_run:
                yield f"{owner}.{other}"
