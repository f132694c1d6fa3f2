"""The subtree of a model's modules that a stage holds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

_TABLES = ("_parameters", "_buffers", "_modules")


def prune_tree(module: nn.Module, keep: set[str], path: str = "") -> nn.Module:
    """Return a copy of the module tree at ``path`` with only the members whose paths from the top are in ``keep``.

    These are not copied; the modules above them are.
    """
    prefix = f"{path}." if path else ""
    copied = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    for table in _TABLES[:2]:
        copied.__dict__[table] = {name: value for name, value in module.__dict__[table].items() if prefix + name in keep}
    copied.__dict__["_modules"] = children = {}
    for name, child in module._modules.items():
        if prefix + name in keep:
            children[name] = child
        elif child is not None and any(kept.startswith(f"{prefix}{name}.") for kept in keep):
            children[name] = prune_tree(child, keep, prefix + name)
    return copied


def assign_modules(root: nn.Module, used: Sequence[set[str]]) -> list[set[str]]:
    """Return the paths that each stage holds, for ``prune_tree``: members that it uses, and unused ones that follow these.

    Together they cover the model.

    Args:
        used: Per stage the paths of the modules, parameters and buffers that it calls or reads.
    """
    divided = [set(paths) for paths in used]
    parents = {".".join(path.split(".")[:depth]) for paths in used for path in paths for depth in range(path.count(".") + 1)}
    current = 0
    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        nonlocal current
        for table in _TABLES:
            for name, value in module.__dict__[table].items():
                path = prefix + name
                users = [index for index, paths in enumerate(used) if path in paths]
                if users:
                    current = users[-1]
                elif value is not None and id(value) not in seen:
                    if table == "_modules" and path in parents:
                        visit(value, f"{path}.")
                    else:
                        divided[current].add(path)
                if value is not None:
                    seen.add(id(value))

    visit(root, "")
    return divided
