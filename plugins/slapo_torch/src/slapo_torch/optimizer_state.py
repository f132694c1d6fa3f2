"""What a checkpoint keeps of an optimizer: its ``state_dict`` with the original names of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slapo_core.errors import BuildError

from .model_state import parameters
from .plain import check_plain

_ANOTHER = "build with the factory it was saved with"


def packed(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
    """What is written of the optimizer.

    Raises:
        BuildError: its state has objects that would only come back by running what a file says.
    """
    if optimizer is None:
        return None
    (names, listed), written = _names(module, optimizer), optimizer.state_dict()
    state = {names[key] if isinstance(key, int) else key: value for key, value in written.pop("state").items()}
    groups = [{**group, "params": own} for group, own in zip(written.pop("param_groups"), listed, strict=True)]
    result = {"class": _class(optimizer), "state": state, "groups": groups, "more": written}
    check_plain(result, f"the state of {type(optimizer).__name__}")
    return result


def check_same(module: nn.Module, optimizer: torch.optim.Optimizer | None, saved: Mapping[str, Any] | None) -> None:
    """Refuse the state of another optimizer; an engine without one needs none.

    Raises:
        BuildError: no state was saved, or that of another class, or other groups.
    """
    if optimizer is None:
        return
    if saved is None:
        raise BuildError("the checkpoint has no optimizer state; build without optimizer= to load the weights alone")
    if saved["class"] != _class(optimizer):
        raise BuildError(f"the checkpoint's optimizer is {saved['class']}, the engine's is {_class(optimizer)}; {_ANOTHER}")
    _, listed = _names(module, optimizer)
    if [group["params"] for group in saved["groups"]] != listed:
        raise BuildError(f"the checkpoint's optimizer has other parameter groups; {_ANOTHER}")


def put(module: nn.Module, optimizer: torch.optim.Optimizer | None, saved: Mapping[str, Any] | None) -> None:
    """Hand the optimizer what was saved."""
    if optimizer is None or saved is None:
        return
    names, _ = _names(module, optimizer)
    index = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [index[name] for name in group["params"]]} for group in saved["groups"]]
    state = {index.get(key, key): value for key, value in saved["state"].items()}
    optimizer.load_state_dict({**saved["more"], "state": state, "param_groups": groups})


def _class(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[str], list[list[str]]]:
    """Original names in the order in which the optimizer counts its parameters, and by its groups."""
    names = {id(parameter): name for name, parameter in parameters(module).items()}
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    return [name for group in groups for name in group], groups
