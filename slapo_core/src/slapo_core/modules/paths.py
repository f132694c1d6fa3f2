"""Dotted module paths: look-up, joining, globs."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

from torch import nn


def join(prefix: str, name: str) -> str:
    """``join("a", "b.c") == "a.b.c"``; either may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def find(root: nn.Module, path: str) -> nn.Module | None:
    """The module at ``path``, or None."""
    module: nn.Module | None = root
    for name in path.split(".") if path else ():
        module = module._modules.get(name) if module is not None else None
    return module


def resolve_aliases(root: nn.Module, path: str) -> str:
    """Return the path that ``path`` stands for, where modules on the way know submodules by other names.

    A module says so by a method ``_slapo_submodule_path(name)``, which returns a path below it.
    """
    names: list[str] = []
    for name in path.split("."):
        holder = find(root, ".".join(names))
        alias = getattr(type(holder), "_slapo_submodule_path", None)
        names.append(alias(holder, name) if holder is not None and alias is not None and name not in holder._modules else name)
    return ".".join(names)


def split(path: str) -> tuple[str, str]:
    """``split("a.b.c") == ("a.b", "c")``."""
    parent, _, name = path.rpartition(".")
    return parent, name


def select(root: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose path matches a glob: ``*``, ``?`` and ``[..]`` within one name, ``**`` over any number of names."""
    yield from _select(root, "", tuple(pattern.split(".")))


def nearby(root: nn.Module, path: str) -> list[str]:
    """At most a dozen modules: those whose path ends so, else those below the last one on the way that holds any."""
    if same := [name for name, _ in root.named_modules() if name.endswith(f".{path}")]:
        return same[:12]
    head = split(path)[0]
    while not (inside := [module for _, module in select(root, head) if module._modules] if head else [root]):
        head = split(head)[0]
    return [join(head, name) for name, _ in inside[0].named_children()][:12]


def _select(module: nn.Module, path: str, parts: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    if not parts:
        yield path, module
        return
    head, rest = parts[0], parts[1:]
    if head == "**":
        yield from _select(module, path, rest)
    for name, child in module._modules.items():
        if child is None:
            continue
        if head == "**":
            yield from _select(child, join(path, name), parts)
        elif fnmatch.fnmatchcase(name, head):
            yield from _select(child, join(path, name), rest)


def is_module_list(module: nn.Module, name: str = "", parent: Any = None) -> bool:
    """Return whether the module is a list of modules, also after tracing made a plain container of it.

    Args:
        module: The module.
        name: Not needed; kept for callers of the established signature.
        parent: Not needed either.
    """
    names = list(module._modules)
    return isinstance(module, nn.ModuleList) or (type(module) is nn.Module and bool(names) and all(map(str.isdigit, names)))
