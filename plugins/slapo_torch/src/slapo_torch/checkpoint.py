"""Save and load an engine: model, optimizer and random states, to go on exactly on the same layout.

A directory with ``layout.json``, written last, and per place of the mesh ``weights-pp0-tp0.pt`` (equal in all replicas, so
written by the first) and ``random-pp0-dp0-tp0.pt``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core.agreement import agree
from slapo_core.errors import BuildError
from slapo_core.parameters import facts, is_part, shard_spec
from slapo_core.program import Program
from slapo_core.random import RNGState, rng_state, set_rng_state

_AXES = ("pp", "dp", "tp")
_CUT = ("dim", "full_shape", "rank", "num_shards", "blocks", "axis")
_FORMAT = 2


def save_checkpoint(
    path: str | os.PathLike[str], program: Program, module: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Write this rank's part. Collective; a directory without ``layout.json`` is not complete."""
    folder = Path(path)
    layout = folder / "layout.json"
    first = not dist.is_initialized() or all(program.axis_rank(axis) == 0 for axis in _AXES)

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if first:
            layout.unlink(missing_ok=True)

    def write() -> None:
        if program.axis_rank("dp") == 0:
            tensors = _tensors(module)
            state = {
                "model": {name: tensor.detach() for name, tensor in tensors.items()},
                "cuts": {name: _cut(tensor) for name, tensor in tensors.items()},
                "optimizer": _optimizer_state(module, optimizer),
            }
            torch.save(state, folder / _file("weights", program, "pp", "tp"))
        random = rng_state()
        torch.save({"devices": random.devices, "tracked": random.tracked}, folder / _file("random", program, *_AXES))

    def finish() -> None:
        if first:
            layout.write_text(json.dumps(_layout(program)))

    for action in (begin, write, finish):
        _on_all(action, program)


def load_checkpoint(
    path: str | os.PathLike[str], program: Program, module: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Read this rank's part; nothing is changed before all ranks have found theirs to fit. Collective.

    Raises:
        BuildError: on every rank: not a complete checkpoint, another layout, other parameters or another optimizer.
    """
    folder = Path(path)
    found: dict[str, Any] = {}

    def read() -> None:
        if not (folder / "layout.json").exists():
            raise BuildError(f"{os.fspath(path)!r} is no complete checkpoint: it has no layout.json")
        saved, own = json.loads((folder / "layout.json").read_text()), _layout(program)
        if saved.get("format") != _FORMAT:
            raise BuildError(
                f"{os.fspath(path)!r} has format {saved.get('format')}, this version reads {_FORMAT}; save it anew"
            )
        if saved != own:
            raise BuildError(f"saved with {_words(saved)}, but this engine has {_words(own)}; load it on the same layout")
        found.update(torch.load(folder / _file("weights", program, "pp", "tp"), map_location="cpu", weights_only=True))
        found["random"] = torch.load(folder / _file("random", program, *_AXES), map_location="cpu", weights_only=True)
        _check_same(_tensors(module), found["model"], found["cuts"])
        if optimizer is not None and found["optimizer"] is None:
            raise BuildError("the checkpoint has no optimizer state; build without optimizer= to load the weights alone")

    def put() -> None:
        with torch.no_grad():
            for name, tensor in _tensors(module).items():
                tensor.copy_(found["model"][name])
        if optimizer is not None:
            _load_optimizer(module, optimizer, found["optimizer"])
        set_rng_state(RNGState(found["random"]["devices"], found["random"]["tracked"], ()))

    for action in (read, put):
        _on_all(action, program)


def _on_all(action: Callable[[], None], program: Program) -> None:
    error = None
    try:
        action()
    except Exception as err:
        error = err
    agree(error, program.mesh)


def _layout(program: Program) -> dict[str, Any]:
    return {"format": _FORMAT, "stages": len(program.stages), **{axis: program.axis_size(axis) for axis in _AXES}}


def _words(layout: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in layout.items() if key in _AXES)


def _file(kind: str, program: Program, *axes: str) -> str:
    return f"{kind}-{'-'.join(f'{axis}{program.axis_rank(axis)}' for axis in axes)}.pt"


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by their first name in the unmodified model, a tied one once."""
    kept = set(module.state_dict(keep_vars=True))
    named = [*module.named_parameters(), *((name, buffer) for name, buffer in module.named_buffers() if name in kept)]
    return {_original(name, tensor): tensor for name, tensor in named}


def _original(name: str, tensor: torch.Tensor) -> str:
    names = facts(tensor).names
    return names[0] if names else name


def _cut(tensor: torch.Tensor) -> dict[str, Any] | None:
    """How this rank's part was cut from the full tensor; None for a whole one."""
    spec = shard_spec(tensor)
    return {key: getattr(spec, key) for key in _CUT} if is_part(tensor) else None


def _check_same(tensors: dict[str, torch.Tensor], saved: dict[str, torch.Tensor], cuts: dict[str, Any]) -> None:
    if odd := sorted(set(tensors) ^ set(saved)):
        where = "checkpoint" if odd[0] in tensors else "engine"
        raise BuildError(f"{odd[0]!r} is not in the {where}; load it into the model and stages it was saved from")
    for name, tensor in tensors.items():
        if _cut(tensor) != cuts[name]:
            raise BuildError(
                f"{name!r} is {_described(cuts[name])} in the checkpoint, but {_described(_cut(tensor))} in the engine; "
                "load it into a schedule that shards alike"
            )
        kinds = [(tuple(each.shape), str(each.dtype)) for each in (saved[name], tensor)]
        if kinds[0] != kinds[1]:
            raise BuildError(
                f"{name!r} has shape {kinds[0][0]} and {kinds[0][1]} in the checkpoint, {kinds[1][0]} and {kinds[1][1]} in the "
                "engine; load it into the model it was saved from"
            )


def _described(cut: dict[str, Any] | None) -> str:
    return f"sharded with {', '.join(f'{key}={value}' for key, value in cut.items())}" if cut else "whole"


def _optimizer_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Original names in the order in which the optimizer counts its parameters."""
    names = {id(parameter): _original(name, parameter) for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    names, state = _optimizer_names(module, optimizer), optimizer.state_dict()
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[index]: value for index, value in state["state"].items()}, "groups": groups}


def _load_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    names = _optimizer_names(module, optimizer)
    listed = [name for group in saved["groups"] for name in group["params"]]
    if listed != names:
        raise BuildError("the checkpoint's optimizer has other parameter groups; build with the factory it was saved with")
    index = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [index[name] for name in group["params"]]} for group in saved["groups"]]
    optimizer.load_state_dict({"state": {index[name]: value for name, value in saved["state"].items()}, "param_groups": groups})
