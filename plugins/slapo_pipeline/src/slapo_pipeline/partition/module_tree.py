"""The subtree of a model's modules that a stage holds, and the parameters that several stages hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from slapo_core import TieGroup

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


def analyze_tie_weights(top_mod: nn.Module, is_pipeline_partitioned: bool) -> dict[nn.Parameter, set[tuple[str, int]]]:
    """Find the parameters that are registered under several names, in time linear in the size of the model.

    Args:
        top_mod: The model; when partitioned, a module whose children are the stages, in order.
        is_pipeline_partitioned: Whether the model is partitioned. If not, every stage number is 0.

    Returns:
        Tied parameter to the set of its ``(name, stage)``, with the name inside the stage. For a partitioned model, only
        parameters that several stages hold.
    """
    stages = list(top_mod.children()) if is_pipeline_partitioned else [top_mod]
    first: dict[int, tuple[str, int]] = {}
    tied: dict[nn.Parameter, set[tuple[str, int]]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            place = first.setdefault(id(parameter), (name, index))
            if place != (name, index):
                tied.setdefault(parameter, {place}).add((name, index))
    if not is_pipeline_partitioned:
        return tied
    return {parameter: places for parameter, places in tied.items() if len({index for _, index in places}) > 1}


def tie_groups(module: nn.Module, stages: Sequence[nn.Module]) -> tuple[TieGroup, ...]:
    """Return the parameters of ``module`` that more than one of its ``stages`` holds, in the order of the model."""
    users: dict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(stages):
        for parameter in stage.parameters():
            users[id(parameter)].append(index)
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return tuple(TieGroup(tuple(names[key]), tuple(users[key])) for key in names if len(users[key]) > 1)
