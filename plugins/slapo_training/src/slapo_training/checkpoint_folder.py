"""The folder of a checkpoint is the same one on every rank, and no other target's."""

from __future__ import annotations

import json
import uuid
from os import PathLike, fspath
from pathlib import Path

from slapo_core.agreement import gather
from slapo_core.errors import BuildError
from slapo_core.program import Program

from .meeting import on_all

MARKS = {"layout.json": "torch", "slapo.json": None}
"""The file that is written last, and whose checkpoint it marks; None: the file says so."""


def to_save(path: str | PathLike[str], program: Program, target: str) -> tuple[Path, str]:
    """The folder, and a number that no other checkpoint has. Collective.

    Raises:
        BuildError: on every rank: the ranks were given different folders, or another target's checkpoint is in it.
    """
    folder = Path(path)
    folders = list(dict.fromkeys(gather(fspath(path), program.mesh)))
    if len(folders) > 1:
        raise BuildError(f"the ranks save to {folders[0]!r} and {folders[1]!r}; give every rank the same folder")

    def check() -> None:
        if folder.exists() and not folder.is_dir():
            raise BuildError(f"{fspath(path)!r} is a file; give a folder")
        if (whose := target_of(folder)) not in (None, target):
            raise BuildError(
                f"{fspath(path)!r} has a checkpoint of target {whose!r}, and this engine is of {target!r}; give another folder"
            )

    on_all(check, program)
    return folder, str(gather(uuid.uuid4().hex, program.mesh)[0])


def to_load(path: str | PathLike[str], target: str) -> Path:
    """The folder, as one rank can see it.

    Raises:
        BuildError: there is none, no complete checkpoint is in it, or another target's.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise BuildError(f"{fspath(path)!r} is no checkpoint of target {target!r}: there is no such folder")
    whose = target_of(folder)
    if whose is None:
        (mark,) = (mark for mark, of in MARKS.items() if (of == target) or (of is None and target not in MARKS.values()))
        raise BuildError(f"{fspath(path)!r} is no complete checkpoint of target {target!r}: it has no {mark}")
    if whose != target:
        raise BuildError(
            f"{fspath(path)!r} is a checkpoint of target {whose!r}, and this engine is of {target!r}; load it there"
        )
    return folder


def check_same(number: str | None, program: Program) -> None:
    """Raise ``BuildError`` on every rank where ranks have read different checkpoints. Collective."""
    if len(set(gather(number, program.mesh))) > 1:
        raise BuildError("the ranks load different checkpoints; give every rank the same one")


def target_of(folder: Path) -> str | None:
    """Whose complete checkpoint is in a folder; None where there is none."""
    for mark, target in MARKS.items():
        if (folder / mark).exists():
            return target or str(json.loads((folder / mark).read_text()).get("target"))
    return None
