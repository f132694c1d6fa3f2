"""The directory of an engine's checkpoint: the engine's own files, what they are of, and each rank's random states."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slapo_core.program import Program

from . import checkpoint_folder, random_state
from .meeting import on_all

ABOUT = "slapo.json"
"""What a checkpoint is of, as JSON. It is written last: a directory without it is not complete."""


def write(path: str | PathLike[str], target: str, program: Program, about: Mapping[str, Any], fill: Callable[[], None]) -> None:
    """Write a checkpoint. Collective.

    Args:
        path: The same folder on every rank; made where there is none.
        target: Whose it is.
        program: Whose ranks.
        about: What is written of it, the same on every rank.
        fill: Writes the engine's own files.

    Raises:
        BuildError: on every rank: it failed on one, the ranks have different folders, or it has another target's checkpoint.
    """
    folder, number = checkpoint_folder.to_save(path, program, target)

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            (folder / ABOUT).unlink(missing_ok=True)

    def put() -> None:
        fill()
        torch.save(random_state.packed(), _random_file(folder))

    def finish() -> None:
        if dist.get_rank() == 0:
            (folder / ABOUT).write_text(json.dumps({"target": target, "number": number, **about}))

    for action in (begin, put, finish):
        on_all(action, program)


def read_about(path: str | PathLike[str], target: str) -> dict[str, Any]:
    """What a checkpoint is of.

    Raises:
        BuildError: it is not complete, or another target's.
    """
    found: dict[str, Any] = json.loads((checkpoint_folder.to_load(path, target) / ABOUT).read_text())
    return found


def read_random(folder: Path) -> Any:
    """The random states of this rank, which are on the same layout only.

    Raises:
        BuildError: they cannot be put back in this process.
    """
    saved = torch.load(_random_file(folder), weights_only=True)
    random_state.check(saved)
    return saved


def layout_of(program: Program) -> dict[str, int]:
    """How many ranks are along each axis."""
    return {axis: program.axis_size(axis) for axis in ("pp", "dp", "tp")}


def _random_file(folder: Path) -> Path:
    return folder / f"random-{dist.get_rank()}.pt"
