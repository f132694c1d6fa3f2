"""What a checkpoint keeps of an optimizer: its ``state_dict`` by the original names of parameters, for all ranks together.

A tensor with a number for each element of a parameter lies where the parameter does. Single numbers are kept once. What has
another shape is kept once of a parameter that this rank has whole; of a part of one it fits the same parts only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core.errors import BuildError
from slapo_core.parameters import is_part
from slapo_training.model_tensors import parameters
from slapo_training.pieces import Piece
from slapo_training.plain import check_plain

from .model_state import piece
from .replica_spec import replica_spec

_ANOTHER = "build with the factory it was saved with"
_FOREIGN = ""
"""The name of what is kept of no parameter."""


class State(NamedTuple):
    """This rank's.

    Args:
        tensors: By the name of the parameter and the optimizer's own for it, where they lie.
        once: What is kept once, plain data.
        parts: What fits parts of parameters as this rank has them, by parameter.
    """

    tensors: dict[tuple[str, str], Piece]
    once: dict[str, Any] | None
    parts: dict[str, dict[str, Any]]


def key_of(name: str, key: str) -> str:
    """The name of a tensor in the checkpoint."""
    return f"optimizer.{key}.{name}"


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


def held(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    """What is written of the optimizer, which was checked."""
    if optimizer is None:
        return State({}, None, {})
    named, known = _named_state(module, optimizer), parameters(module)
    tensors: dict[tuple[str, str], Piece] = {}
    once: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, state in named.pop("state").items():
        if name not in known:
            parts.setdefault(_FOREIGN, {})[name] = state
            continue
        parameter = known[name]
        own: dict[str, Any] = {"tensors": [], "numbers": {}, "values": {}, "parts": []}
        for key, value in state.items():
            if _is_per_element(value, parameter):
                own["tensors"].append(key)
                tensors[name, key] = piece(parameter, value)
            elif isinstance(value, torch.Tensor) and value.dim() == 0:
                own["numbers"][key] = value.item(), value.dtype  # pickled by the thousand, tensors would take their time
            elif _is_one(value) or not is_part(parameter):
                own["values"][key] = value
            else:
                own["parts"].append(key)
                parts.setdefault(name, {})[key] = value
        once[name] = own
    return State(tensors, {**named, "state": once, "foreign": _FOREIGN in parts}, parts)


def merged(ranks: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """What is kept once, of the optimizers of all pipeline ranks.

    Args:
        ranks: ``State.once`` of each.
    """
    found = [each for each in ranks if each is not None]
    if not found:
        return None
    state = {name: own for each in reversed(found) for name, own in each["state"].items()}
    foreign = any(each["foreign"] for each in found)
    return {**found[0], "state": state, "groups": _all_groups([each["groups"] for each in found]), "foreign": foreign}


def _all_groups(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The groups of all ranks: the first of each are one, and so on; where they have different numbers, those set alike."""
    numbered = len({len(groups) for groups in ranks}) == 1
    found: dict[str, dict[str, Any]] = {}
    for groups in ranks:
        for number, group in enumerate(groups):
            options = {key: value for key, value in group.items() if key != "params"}
            one = found.setdefault(str(number) if numbered else repr(sorted(options.items())), {**options, "params": []})
            one["params"] += [name for name in group["params"] if name not in one["params"]]
    return list(found.values())


def groups(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """This rank's groups, by names, and in words what else they have."""
    if optimizer is None:
        return []
    _, listed = _names(module, optimizer)
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return [{"params": own, "options": repr(sorted(each.items()))} for each, own in zip(options, listed, strict=True)]


def check_same(
    optimizer: torch.optim.Optimizer | None, ranks: Sequence[Sequence[Mapping[str, Any]]], saved: Mapping[str, Any] | None
) -> None:
    """Refuse the state of another optimizer; an engine without one needs none.

    Args:
        optimizer: This rank's.
        ranks: ``groups`` of all of them.
        saved: What ``merged`` gave.

    Raises:
        BuildError: no state was saved, or that of another class, or other groups.
    """
    if optimizer is None:
        return
    if saved is None:
        raise BuildError("the checkpoint has no optimizer state; build without optimizer= to load the weights alone")
    if saved["class"] != _class(optimizer):
        raise BuildError(f"the checkpoint's optimizer is {saved['class']}, the engine's is {_class(optimizer)}; {_ANOTHER}")
    own = _all_groups([each for each in ranks if each])
    if _as_sets(own) != _as_sets(saved["groups"]):
        raise BuildError(f"the checkpoint's optimizer has other parameter groups; {_ANOTHER}")


def _as_sets(groups: Sequence[Mapping[str, Any]]) -> set[frozenset[str]]:
    return {frozenset(group["params"]) for group in groups} - {frozenset()}


def wanted(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    saved: Mapping[str, Any] | None,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> dict[tuple[str, str], Piece]:
    """Tensors for what is to be read of the optimizer's state, by parameter and the optimizer's own name."""
    if optimizer is None or saved is None:
        return {}
    found = {}
    for name, parameter in _stepped(module, optimizer).items():
        for key in saved["state"].get(name, {"tensors": ()})["tensors"]:
            _, dtype = shapes[key_of(name, key)]
            found[name, key] = piece(parameter, torch.empty(parameter.shape, dtype=dtype))
    return found


def check_parts(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, saved: Mapping[str, Any] | None, parts: Mapping[str, Any]
) -> None:
    """Refuse state of parts of parameters that are not this rank's.

    Args:
        module: This rank's stages.
        optimizer: Its own.
        saved: What ``merged`` gave.
        parts: What fits this rank's parts, as it was saved.

    Raises:
        BuildError: it would be needed.
    """
    if optimizer is None or saved is None:
        return
    for name, parameter in _stepped(module, optimizer).items():
        kept = saved["state"].get(name, {"parts": (), "values": {}})
        of_whole = [key for key, value in kept["values"].items() if is_part(parameter) and not _is_one(value)]
        for key in [*of_whole, *(key for key in kept["parts"] if key not in parts.get(name, {}))]:
            raise BuildError(
                f"{key!r} in the state of {type(optimizer).__name__} is no number for each element of {name!r}, which is "
                "sharded otherwise than when it was saved; load it on the same layout"
            )
    if saved["foreign"] and _FOREIGN not in parts:
        raise BuildError(f"{type(optimizer).__name__} keeps more than its parameters' state; load it on the same layout")


def put(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    saved: Mapping[str, Any] | None,
    read: Mapping[tuple[str, str], Piece],
    parts: Mapping[str, Any],
) -> None:
    """Hand the optimizer what was saved."""
    if optimizer is None or saved is None:
        return
    names, listed = _names(module, optimizer)
    index = {name: number for number, name in enumerate(names)}
    state: dict[Any, Any] = dict(parts.get(_FOREIGN, {}))
    for name, kept in saved["state"].items():
        if name in index:
            tensors = {key: read[name, key].tensor for key in kept["tensors"]}
            numbers = {key: torch.tensor(value, dtype=dtype) for key, (value, dtype) in kept["numbers"].items()}
            state[index[name]] = {**tensors, **numbers, **kept["values"], **{key: parts[name][key] for key in kept["parts"]}}
    options = {name: group for group in saved["groups"] for name in group["params"]}
    made = []
    for number, own_names in enumerate(listed):
        if own_names:
            found = options[own_names[0]]
        else:
            found = saved["groups"][number] if len(saved["groups"]) == len(listed) else optimizer.param_groups[number]
        made.append({**found, "params": [index[name] for name in own_names]})
    optimizer.load_state_dict({**saved["more"], "state": state, "param_groups": made})


def _stepped(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Those that the optimizer has, by name."""
    known = parameters(module)
    return {name: known[name] for name in _names(module, optimizer)[0]}


def _named_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    (names, listed), written = _names(module, optimizer), optimizer.state_dict()
    state = {names[key] if isinstance(key, int) else key: value for key, value in written.pop("state").items()}
    own = [{**group, "params": own} for group, own in zip(written.pop("param_groups"), listed, strict=True)]
    return {"class": _class(optimizer), "state": state, "groups": own, "more": written}


def _is_per_element(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _is_one(value: Any) -> bool:
    return not isinstance(value, torch.Tensor | list | tuple | dict) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _class(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[str], list[list[str]]]:
    """Original names in the order in which the optimizer counts its parameters, and by its groups."""
    names = {id(parameter): name for name, parameter in parameters(module).items()}
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    return [name for group in groups for name in group], groups
