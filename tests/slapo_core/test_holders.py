"""The index of who holds what stays right through any sequence of edits."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slapo_core.modules.holders import Holders


def tree(depth: int, shared: nn.Module) -> nn.Module:
    if depth == 0:
        return nn.Linear(1, 1)
    return nn.ModuleList([tree(depth - 1, shared), shared, nn.ModuleList([nn.Linear(1, 1)])])


def places(holders: Holders, root: nn.Module) -> object:
    values = [*root.modules(), *root.parameters()]
    return {
        id(value): sorted((id(holder), name) for holder, name in holders.places_of(root, value))
        for value in values
        if value is not root
    }


KINDS = ["fresh", "wrap", "share", "unwrap", "parameter", "tied by hand", "shared by hand"]
edits = st.lists(st.tuples(st.integers(0, 50), st.sampled_from(KINDS)), max_size=12)


@given(edits)
def test_kept_up_to_date(steps: list[tuple[int, str]]) -> None:
    root: Any = tree(3, nn.Sequential(nn.Linear(1, 1)))
    holders = Holders()
    for index, kind in steps:
        modules = [module for module in root.modules() if module is not root]
        old = modules[index % len(modules)]
        if kind == "parameter":
            parameters = list(root.parameters())
            value = parameters[index % len(parameters)]
            holders.substitute(holders.places_of(root, value), value, nn.Parameter(value.detach().clone()))
            continue
        if kind == "tied by hand":
            old.tied = next(root.parameters())
            continue
        if kind == "shared by hand":
            root.append(next(module for module in modules if not len(list(module.children()))))
            continue
        new: nn.Module = nn.Sequential(nn.Linear(1, 1))
        if kind == "wrap":
            new = nn.Sequential(old)
        elif kind == "share":
            new = modules[-1]
        elif kind == "unwrap" and len(list(old.children())):
            new = next(old.children())
        if new is old or (kind != "wrap" and any(module is old for module in new.modules())):
            continue
        if kind == "share" and any(module is new for module in old.modules()):
            continue
        if kind == "wrap":  # as Schedule.replace_module does: the wrapper's own hold on the old one must stay
            holders.substitute(holders.places_of(root, old), old, new)
            assert new[0] is old
        else:
            holders.substitute(holders.places_of(root, old), old, new)
        assert places(holders, root) == places(Holders(), root)
