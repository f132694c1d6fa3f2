"""Dotted module paths: look-up, joining, globs."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

from torch import nn


def join(prefix: str, name: str) -> str:
    """Join two dotted paths; either may be empty.

    Example:
        >>> paths.join("h.0", "attn"), paths.join("", "attn")
        ('h.0.attn', 'attn')
    """
    return f"{prefix}.{name}" if prefix and name else prefix or name


def find(root: nn.Module, path: str) -> nn.Module | None:
    """Return the module at ``path``, or None.

    Example:
        >>> paths.find(nn.Sequential(nn.ReLU()), "0"), paths.find(nn.ReLU(), "0")
        (ReLU(), None)
    """
    module: nn.Module | None = root
    for name in path.split(".") if path else ():
        module = module._modules.get(name) if module is not None else None
    return module


def resolve_aliases(root: nn.Module, path: str) -> str:
    """Return the path that ``path`` stands for, where modules on the way have aliases for submodules.

    A module defines aliases in a method ``_slapo_submodule_path(name)``, which returns a path below the module.

    Example:
        >>> class Wrapper(nn.Sequential):
        ...     def _slapo_submodule_path(self, name):
        ...         return {"inner": "0"}.get(name, name)
        >>> paths.resolve_aliases(Wrapper(nn.ReLU()), "inner")
        '0'
    """
    names: list[str] = []
    for name in path.split("."):
        holder = find(root, ".".join(names))
        alias = getattr(type(holder), "_slapo_submodule_path", None)
        names.append(alias(holder, name) if holder is not None and alias is not None and name not in holder._modules else name)
    return ".".join(names)


def split(path: str) -> tuple[str, str]:
    """Split a path into the parent's path and the last name.

    Example:
        >>> paths.split("h.0.attn"), paths.split("h")
        (('h.0', 'attn'), ('', 'h'))
    """
    parent, _, name = path.rpartition(".")
    return parent, name


def select(root: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose path matches a glob: ``*``, ``?`` and ``[..]`` within one name, ``**`` over any number of
    names.

    Example:
        >>> [path for path, _ in paths.select(nn.Sequential(nn.ReLU(), nn.Linear(1, 1)), "[01]")]
        ['0', '1']
    """
    yield from _select(root, "", tuple(pattern.split(".")))


def nearby(root: nn.Module, path: str) -> list[str]:
    """Return at most twelve paths close to one that does not exist, for an error message.

    These are the modules whose path ends in ``path``; else those below the deepest existing module on the way that has any.

    Example:
        >>> model = nn.ModuleDict({"encoder": nn.ModuleDict({"attn": nn.ReLU(), "mlp": nn.ReLU()})})
        >>> paths.nearby(model, "attn"), paths.nearby(model, "encoder.norm")
        (['encoder.attn'], ['encoder.attn', 'encoder.mlp'])
    """
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
    """Return True if the module is a list of modules, or a plain container that tracing made of one.

    Args:
        module: The module.
        name: Unused; part of the established signature.
        parent: Unused; part of the established signature.

    Example:
        >>> is_module_list(nn.ModuleList([nn.ReLU()])), is_module_list(nn.Sequential(nn.ReLU()))
        (True, False)
    """
    names = list(module._modules)
    return isinstance(module, nn.ModuleList) or (type(module) is nn.Module and bool(names) and all(map(str.isdigit, names)))
