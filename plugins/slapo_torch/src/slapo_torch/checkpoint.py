"""Save and load an engine: model, optimizer and random states, to go on exactly on the same layout.

A directory with ``layout.json``, written last, and per place of the mesh ``shared-pp0-tp0.pt`` (parameters and optimizer, equal
in all replicas, so written by the first) and ``own-pp0-dp0-tp0.pt`` (buffers and random states, each replica's own).
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
from slapo_core.program import Program
from slapo_core.random import RNGState, rng_state, set_rng_state

from . import model_state

_AXES = ("pp", "dp", "tp")
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
            parameters = model_state.packed(model_state.parameters(module))
            shared = {"parameters": parameters, "optimizer": _optimizer_state(module, optimizer)}
            torch.save(shared, folder / _file("shared", program, "pp", "tp"))
        random = rng_state()
        own = {
            "buffers": model_state.packed(model_state.buffers(module)),
            "random": {"devices": random.devices, "tracked": random.tracked},
        }
        torch.save(own, folder / _file("own", program, *_AXES))

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
    parameters, buffers = model_state.parameters(module), model_state.buffers(module)

    def read() -> None:
        _check_layout(folder, program)
        found.update(_read(folder / _file("shared", program, "pp", "tp")))
        found.update(_read(folder / _file("own", program, *_AXES)))
        model_state.check_same(parameters, found["parameters"])
        model_state.check_same(buffers, found["buffers"])
        if optimizer is not None and found["optimizer"] is None:
            raise BuildError("the checkpoint has no optimizer state; build without optimizer= to load the weights alone")

    def put() -> None:
        model_state.put(parameters, found["parameters"])
        model_state.put(buffers, found["buffers"])
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


def _read(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _check_layout(folder: Path, program: Program) -> None:
    if not (folder / "layout.json").exists():
        raise BuildError(f"{os.fspath(folder)!r} is no complete checkpoint: it has no layout.json")
    saved, own = json.loads((folder / "layout.json").read_text()), _layout(program)
    if (number := saved.get("format")) != _FORMAT:
        raise BuildError(f"{os.fspath(folder)!r} has format {number}, this version reads format {_FORMAT}; save it anew")
    if saved != own:
        raise BuildError(f"saved with {_words(saved)}, but this engine has {_words(own)}; load it on the same layout")


def _layout(program: Program) -> dict[str, Any]:
    return {"format": _FORMAT, "stages": len(program.stages), **{axis: program.axis_size(axis) for axis in _AXES}}


def _words(layout: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in layout.items() if key in _AXES)


def _file(kind: str, program: Program, *axes: str) -> str:
    return f"{kind}-{'-'.join(f'{axis}{program.axis_rank(axis)}' for axis in axes)}.pt"


def _optimizer_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Original names in the order in which the optimizer counts its parameters."""
    names = {id(parameter): name for name, parameter in model_state.parameters(module).items()}
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
