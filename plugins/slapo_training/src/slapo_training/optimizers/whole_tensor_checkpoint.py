"""Checkpoint of whole-tensor optimizer state beside an engine's own files: each owner writes its state, any layout loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slapo_core import BuildError

from ..checkpoint.plain_data import check_plain
from ..engines.checkpoint_files import bytes_of
from ..model.named_tensors import Tensors
from .construction import lr_scheduler_class
from .named_optimizers import NamedOptimizer, named_optimizers
from .whole_tensor_optimizer import WholeTensorOptimizer
from .whole_tensors.whole_tensor import local_of


def check_kind(saved: bool, optimizer: Any) -> None:
    """Raise ``BuildError`` for a checkpoint without whole-tensor state if the optimizer steps whole tensors."""
    if isinstance(optimizer, WholeTensorOptimizer) and not saved:
        raise BuildError(
            f"{type(optimizer.inner).__name__} steps whole tensors here, and the checkpoint was saved where ranks had all of "
            "them; load it on such a layout, or use target='torch', which loads on any"
        )


def facts_of(optimizer: Any, rate: Any) -> dict[str, Any]:
    """Return what a checkpoint says of an optimizer and the schedule of its learning rate, or of None in their place."""
    return {
        "optimizer": None if optimizer is None else type(WholeTensorOptimizer.unwrap(optimizer)).__name__,
        "whole": isinstance(optimizer, WholeTensorOptimizer),
        "lr_scheduler": None if rate is None else lr_scheduler_class(rate),
    }


def file_of(place: int) -> str:
    return f"whole-{place}.pt"


def pack_state(optimizer: Any, parameters: Tensors) -> bytes | None:
    """Return the bytes that this rank writes; None if its optimizer does not step whole tensors.

    The parameters are by first original name, as the optimizer steps unsharded ones.

    Raises:
        BuildError: a state has objects that are not plain data.
    """
    if not isinstance(optimizer, WholeTensorOptimizer):
        return None
    found = {path: _state_of(each) for path, each in named_optimizers(parameters, optimizer).items()}
    check_plain(found, f"the state of {type(optimizer.inner).__name__}")
    return bytes_of(found)


def read(folder: Path, places: int) -> list[dict[str, Any]]:
    return [torch.load(folder / file_of(place), map_location="cpu", weights_only=True) for place in range(places)]


def put(optimizer: Any, parameters: Tensors, saved: Sequence[Mapping[str, Any]]) -> None:
    """Load the state of the parameters that this rank steps.

    Raises:
        BuildError: a stepped parameter is not in the files, or the optimizer has another class.
    """
    for path, named in named_optimizers(parameters, optimizer).items():
        everyone = [each[path] for each in saved if path in each]
        state = _whole_states(everyone)
        listed = [group for each in reversed(everyone) for group in each["groups"]]
        options = {name: group["options"] for group in listed for name in group["names"]}
        names, groups = named.names()
        kind = type(named.optimizer).__name__
        if any(each["class"] != kind for each in everyone) or any(name not in options for name in names):
            raise BuildError(f"the checkpoint's optimizer is not {kind}, or has other parameters; build with the same")
        index = {name: number for number, name in enumerate(names)}
        made = [
            {**(options[own[0]] if own else _options(group)), "params": [index[name] for name in own]}
            for own, group in zip(groups, named.optimizer.param_groups, strict=True)
        ]
        own_state: dict[Any, Any] = {index[name]: _own_state(named, name, state[name]) for name in named.own() if name in state}
        more: dict[str, Any] = next((each["more"] for each in everyone), {})
        named.load_state_dict({**more, "state": own_state, "param_groups": made})
    if isinstance(optimizer, WholeTensorOptimizer):
        optimizer.take_options()


def _state_of(named: NamedOptimizer) -> dict[str, Any]:
    names, groups = named.names()
    written = named.state_dict()
    state = {names[key]: value for key, value in written.pop("state").items() if type(key) is int}
    shards = {name: _shard(named, name, state[name]) for name in named.parts.keys() & state.keys()}
    state |= {name: {key: local_of(value) for key, value in state[name].items()} for name in shards}
    written.pop("param_groups")
    listed = [
        {"names": own, "options": _options(group)} for own, group in zip(groups, named.optimizer.param_groups, strict=True)
    ]
    return {"class": type(named.optimizer).__name__, "state": state, "shards": shards, "groups": listed, "more": written}


def _shard(named: NamedOptimizer, name: str, state: Mapping[Any, Any]) -> tuple[int, int, list[Any]]:
    """Return the dimension and start of a shard, and the keys of the state that is sharded like it."""
    from .dtensors import shard_of  # noqa: PLC0415  torch.distributed.tensor takes a second

    parameter: Any = named.known[name]
    dim, start, _ = shard_of(parameter)
    return dim, start, [key for key, value in state.items() if getattr(value, "shape", None) == parameter.shape]


def _own_state(named: NamedOptimizer, name: str, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
    if name not in named.parts:
        return state
    from .dtensors import shares_of  # noqa: PLC0415  torch.distributed.tensor takes a second

    parameter: Any = named.known[name]
    return shares_of(parameter, state)


def _whole_states(everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of whole parameters, assembled from the files of all ranks."""
    state = {name: one for each in reversed(everyone) for name, one in each["state"].items()}
    shards: dict[str, dict[int, tuple[int, dict[Any, torch.Tensor]]]] = {}
    for each in everyone:
        for name, (dim, start, keys) in each.get("shards", {}).items():
            shards.setdefault(name, {})[start] = dim, {key: each["state"][name][key] for key in keys}
    for name, found in shards.items():
        parts = [tensors for _, (_, tensors) in sorted(found.items())]
        dim = next(dim for dim, _ in found.values())
        state[name] = {**state[name], **{key: torch.cat([part[key] for part in parts], dim) for key in parts[0]}}
    return state


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
