"""Save and load an engine: model, optimizer and random states, to go on exactly on the same layout.

A directory with ``layout.json``, written last, and per place of the mesh ``shared-pp0-tp0.pt`` (parameters and optimizer, equal
in all replicas, so written by the first) and ``own-pp0-dp0-tp0.pt`` (buffers, the modules' extra state and random states, which
are each replica's own).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core.causes import reason
from slapo_core.errors import BuildError
from slapo_core.program import Program
from slapo_training import checkpoint_folder, random_state
from slapo_training.meeting import on_all

from . import extra_state, model_state, optimizer_state
from .updates import Progress

_AXES = ("pp", "dp", "tp")
_FORMAT = 3


def save_checkpoint(
    path: str | os.PathLike[str],
    program: Program,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    progress: Progress,
) -> None:
    """Write this rank's part. Collective; a directory without ``layout.json`` is not complete.

    Raises:
        SlapoError: on every rank, before anything is written: something in the state cannot be saved.
    """
    folder, number = checkpoint_folder.to_save(path, program, "torch")
    layout = folder / "layout.json"
    first = not dist.is_initialized() or all(program.axis_rank(axis) == 0 for axis in _AXES)

    parts: dict[Path, Any] = {}
    states: dict[str, Any] = {}

    def check() -> None:
        optimizer_state.check(module, optimizer)
        states.update(parameters=model_state.parameters(module), progress=progress.packed())

    def collect() -> None:  # all replicas, which may have to send each other what they share out
        parameters = model_state.packed(states["parameters"])
        shared = {"parameters": parameters, "optimizer": optimizer_state.packed(module, optimizer)}
        if program.axis_rank("dp") == 0:
            parts[folder / _file("shared", program, "pp", "tp")] = {**shared, "progress": states["progress"]}
        parts[folder / _file("own", program, *_AXES)] = {
            "buffers": model_state.packed(model_state.buffers(module)),
            "extra": extra_state.packed(program.module),
            "random": random_state.packed(),
        }

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if first:
            layout.unlink(missing_ok=True)

    def write() -> None:
        for file, part in parts.items():
            torch.save(part, file)

    def finish() -> None:
        if first:
            layout.write_text(json.dumps({**_layout(program), "number": number}))

    for action in (check, collect, begin, write, finish):
        on_all(action, program)


def load_checkpoint(
    path: str | os.PathLike[str],
    program: Program,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    progress: Progress,
) -> None:
    """Read this rank's part; nothing is changed before all ranks have found theirs to fit. Collective.

    Raises:
        BuildError: on every rank: not a complete checkpoint, another layout, other parameters or another optimizer.
    """
    folder = Path(path)
    found: dict[str, Any] = {}
    numbers: list[str] = []
    tensors: dict[str, model_state.Tensors] = {}

    def read() -> None:
        numbers.append(_check_layout(folder, program))
        found.update(_read(folder / _file("shared", program, "pp", "tp")))
        found.update(_read(folder / _file("own", program, *_AXES)))
        tensors.update(parameters=model_state.parameters(module), buffers=model_state.buffers(module))
        for kind, held in tensors.items():
            model_state.check_same(held, found[kind])
        optimizer_state.check_same(module, optimizer, found["optimizer"])
        progress.check_same(found["progress"])
        extra_state.check_same(program.module, found["extra"])
        random_state.check(found["random"])

    def put_foreign() -> None:  # others' code, which may raise, while the tensors are as they were
        extra_state.put(program.module, found["extra"])
        optimizer_state.put(module, optimizer, found["optimizer"])
        progress.put(found["progress"])

    def put() -> None:
        for kind, held in tensors.items():
            model_state.put(held, found[kind])
        random_state.put(found["random"])

    on_all(read, program)
    checkpoint_folder.check_same(numbers[0], program)
    for action in (put_foreign, put):
        on_all(action, program)


def _read(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as err:
        raise BuildError(
            f"{os.fspath(file)!r} of the checkpoint is missing or broken: {reason(err)}; load another one"
        ) from err


def _check_layout(folder: Path, program: Program) -> str:
    """The number of the checkpoint, if it fits."""
    path = checkpoint_folder.to_load(folder, "torch") / "layout.json"
    saved, own = json.loads(path.read_text()), _layout(program)
    number = str(saved.pop("number", ""))
    if (kind := saved.get("format")) != _FORMAT:
        raise BuildError(f"{os.fspath(folder)!r} has format {kind}, this version reads format {_FORMAT}; save it anew")
    if saved != own:
        raise BuildError(
            f"saved with {_words(saved)}, but this engine has {_words(own)}; load it on the same mesh and in the same stages"
        )
    return number


def _layout(program: Program) -> dict[str, Any]:
    return {"format": _FORMAT, "stages": len(program.stages), **{axis: program.axis_size(axis) for axis in _AXES}}


def _words(layout: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in layout.items() if key != "format")


def _file(kind: str, program: Program, *axes: str) -> str:
    return f"{kind}-{'-'.join(f'{axis}{program.axis_rank(axis)}' for axis in axes)}.pt"
