"""Extra state of modules in checkpoints: ``get_extra_state`` and ``set_extra_state``."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from slapo_core import BuildError
from slapo_tracing.graphs import as_original
from slapo_training.checkpoint import StateLoading, check_plain


def collect(model: nn.Module) -> dict[str, Any]:
    """Return the extra state of each module that has some, by path.

    Raises:
        BuildError: a state has objects that are no plain data.
    """
    states = {path: module.get_extra_state() for path, module in _modules_with_extra_state(model).items()}
    for path, state in states.items():
        check_plain(state, f"the extra state of {path!r}")
    return states


def modules_run(model: nn.Module, stages: nn.Module) -> set[str]:
    """Return the paths of modules with extra state that this rank's stages run."""
    own = {id(module) for module in stages.modules()}
    return {path for path in _modules_with_extra_state(model) if id(model.get_submodule(path)) in own}


def merge(ranks: Sequence[tuple[Mapping[str, Any], set[str]]]) -> dict[str, Any]:
    """Return the extra state of each module, from the first rank of one pipeline that runs the module."""
    found: dict[str, Any] = {}
    for is_run in (True, False):
        for states, paths in ranks:
            for path, state in states.items():
                if not is_run or path in paths:
                    found.setdefault(path, state)
    return found


def state_for_rank(own: Mapping[str, Any], foreign: Collection[str], merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's extra state on the same layout: its own, or the merged state of modules that other ranks ran.

    Args:
        foreign: Paths of modules that this rank runs now and other ranks ran before.
    """
    return {path: state if path in foreign else own[path] for path, state in merged.items()}


def check_same(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Refuse extra state of other modules.

    Raises:
        BuildError: a module has extra state in the checkpoint only or in the engine only.
    """
    if odd := sorted(set(saved) ^ set(_modules_with_extra_state(model))):
        where = "engine" if odd[0] in saved else "checkpoint"
        raise BuildError(f"the extra state of {odd[0]!r} is not in the {where}; load it into the model it was saved from")


def restore(model: nn.Module, saved: Mapping[str, Any], loading: StateLoading) -> None:
    for path, module in _modules_with_extra_state(model).items():
        now = module.get_extra_state
        loading.load(f"{path!r}", module.set_extra_state, saved[path], lambda now=now: copy.deepcopy(now()))  # type: ignore[misc]


def _modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    modules = {path: as_original(module) for path, module in model.named_modules()}
    return {path: module for path, module in modules.items() if type(module).get_extra_state is not nn.Module.get_extra_state}
