"""What a checkpoint keeps of an optimizer: its ``state_dict`` with the original names of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slapo_core.errors import BuildError

from .model_state import parameters
from .plain import check_plain
from .replica_spec import in_replica, joined, replica_spec

_ANOTHER = "build with the factory it was saved with"


def check(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse to write what could not be read back.

    Raises:
        BuildError: its state has objects that would only come back by running what a file says, or tensors of other shapes than
            the parameters have, where replicas share these out.
    """
    if optimizer is None:
        return
    check_plain(_named_state(module, optimizer), f"the state of {type(optimizer).__name__}")
    for parameter, state in optimizer.state.items():
        whole = replica_spec(parameter) is None
        odd = [key for key, value in state.items() if not (whole or _is_one(value) or _is_per_element(value, parameter))]
        if odd:
            raise BuildError(
                f"{odd[0]!r} in the state of {type(optimizer).__name__} is no number for each element of a parameter, and "
                "replicas have rows of these; only data_parallel='ddp' saves it"
            )


def packed(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
    """What is written of the optimizer, which was checked. Collective over the replicas, where they share it out."""
    if optimizer is None:
        return None
    result = _named_state(module, optimizer)
    state = result["state"]
    for name, parameter in parameters(module).items():
        if replica_spec(parameter) is not None and name in state:
            own = state[name].items()
            state[name] = {k: joined(parameter, v) if _is_per_element(v, parameter) else v for k, v in own}
    return result


def _named_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    (names, listed), written = _names(module, optimizer), optimizer.state_dict()
    state = {names[key] if isinstance(key, int) else key: value for key, value in written.pop("state").items()}
    groups = [{**group, "params": own} for group, own in zip(written.pop("param_groups"), listed, strict=True)]
    return {"class": _class(optimizer), "state": state, "groups": groups, "more": written}


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
    held = parameters(module)
    state = {index.get(key, key): _mine(value, held.get(key)) for key, value in saved["state"].items()}
    optimizer.load_state_dict({**saved["more"], "state": state, "param_groups": groups})


def _mine(state: Any, parameter: torch.Tensor | None) -> Any:
    """What this rank keeps for a parameter out of what its replica has."""
    spec = replica_spec(parameter) if parameter is not None else None
    if spec is None or parameter is None:
        return state
    whole = in_replica(parameter)
    return {key: spec.cut(value) if _is_per_element(value, whole) else value for key, value in state.items()}


def _is_per_element(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _is_one(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _class(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[str], list[list[str]]]:
    """Original names in the order in which the optimizer counts its parameters, and by its groups."""
    names = {id(parameter): name for name, parameter in parameters(module).items()}
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    return [name for group in groups for name in group], groups
