"""Entries of an ``nn.ModuleDict`` that a model selects by name, such as the adapters of a projection."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..dry_run.layouts import Layouts
from ..dry_run.node_values import calls_by_path
from ..local_sizes.adapted_modules import is_inside


def unused_entries(root: nn.Module, layouts: Layouts, path: str) -> Iterator[str]:
    """Yield the entries of an ``nn.ModuleDict`` beside the module at ``path``, of its class, that did not run as it did."""
    owner, _, name = path.rpartition(".")
    table = root.get_submodule(owner)
    if path and isinstance(table, nn.ModuleDict):
        called = calls_by_path(layouts.graph)
        for other, module in table.items():
            has_run = any(is_inside(each, f"{owner}.{other}") for each in called)
            if type(module) is type(table[name]) and not has_run:
                yield f"{owner}.{other}"
