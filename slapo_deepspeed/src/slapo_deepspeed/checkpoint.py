"""Checkpoints of DeepSpeed's, beside them what it does not know: the layout, and each rank's random states."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slapo_core.errors import BuildError
from slapo_core.program import Program
from slapo_training import random_state
from slapo_training.meeting import on_all

_LAYOUT = "slapo.json"
_AXES = ("pp", "dp", "tp")


def save(model: Any, path: str | PathLike[str], program: Program, zero_stage: int) -> None:
    """Write DeepSpeed's checkpoint and what belongs to it. Collective; a directory without ``slapo.json`` is not complete."""
    folder = Path(path)

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            (folder / _LAYOUT).unlink(missing_ok=True)

    def write() -> None:
        model.save_checkpoint(str(folder))
        torch.save(random_state.packed(), _random_file(folder))

    def finish() -> None:
        if dist.get_rank() == 0:
            (folder / _LAYOUT).write_text(json.dumps(_layout(program, zero_stage)))

    for action in (begin, write, finish):
        on_all(action, program)


def load(model: Any, path: str | PathLike[str], program: Program, zero_stage: int) -> None:
    """Read it. Collective.

    Raises:
        BuildError: on every rank: it is none, or of another layout than DeepSpeed can load it into.
    """
    folder = Path(path)
    found: dict[str, Any] = {}

    def check() -> None:
        found.update(_checked(folder, _layout(program, zero_stage)))
        if found["dp"] == program.axis_size("dp"):
            found["random"] = torch.load(_random_file(folder), weights_only=True)
            random_state.check(found["random"])

    def read() -> None:
        if model.load_checkpoint(str(folder))[0] is None:
            raise BuildError(f"DeepSpeed finds no checkpoint in {str(folder)!r}")

    def go_on() -> None:
        if "random" in found:
            random_state.put(found["random"])

    for action in (check, read, go_on):
        on_all(action, program)


def _checked(folder: Path, own: dict[str, int]) -> dict[str, int]:
    try:
        saved: dict[str, int] = json.loads((folder / _LAYOUT).read_text())
    except FileNotFoundError:
        raise BuildError(f"{str(folder)!r} is no complete checkpoint of this target: it has no {_LAYOUT}") from None
    needed = [key for key in own if key != "dp" or own["zero"]]
    if all(saved.get(key) == own[key] for key in needed):
        return saved
    words = [", ".join(f"{key}={layout.get(key)}" for key in own) for layout in (saved, own)]
    raise BuildError(
        f"saved with {words[0]}, but this engine has {words[1]}; load it on the same layout"
        + (", or without ZeRO at another dp" if own["zero"] else "")
        + ", or convert it with DeepSpeed's ds_to_universal and load that by engine.model"
    )


def _layout(program: Program, zero_stage: int) -> dict[str, int]:
    return {**{axis: program.axis_size(axis) for axis in _AXES}, "zero": zero_stage}


def _random_file(folder: Path) -> Path:
    return folder / f"random-{dist.get_rank()}.pt"
