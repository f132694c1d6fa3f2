"""Manifest of a checkpoint's folder: its target, further facts, and its files with their sums."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from slapo_core import BuildError

MANIFEST = "slapo.json"
FORMAT = 6


def folder_of(path: Any) -> Path:
    """Return the path of a checkpoint's folder; raise ``BuildError`` if it cannot be a path."""
    if not isinstance(path, (str, PathLike)) or not isinstance(fspath(path), str) or not fspath(path):
        raise BuildError(f"the folder of a checkpoint is {path!r}; give a path")
    try:
        os.stat(path)
    except OSError as err:
        if err.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise BuildError(f"the folder of a checkpoint is {path!r}: {err.strerror}; give another path") from err
    except ValueError as err:
        raise BuildError(f"the folder of a checkpoint is {path!r}: {err}; give another path") from err
    return Path(path)


def text_of(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, indent=1, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "checkpoint": content}, indent=1, sort_keys=True)


def content_of(text: str) -> dict[str, Any]:
    """Return the content of a manifest's text; raise ``ValueError`` if the text was changed."""
    found = json.loads(text)
    content: dict[str, Any] = found["checkpoint"]
    if json.loads(text_of(content)) != found:
        raise ValueError("its checksum differs")
    return content


def read(folder: Path, target: str) -> dict[str, Any]:
    """Return the manifest's content of a complete checkpoint.

    Raises:
        BuildError: there is no checkpoint, a damaged one, or one of another target.
    """
    path = fspath(folder)
    if not folder.is_dir():
        raise BuildError(f"{path!r} is not a checkpoint of target {target!r}: there is no such folder")
    if not (folder / MANIFEST).exists():
        raise BuildError(f"{path!r} is not a complete checkpoint of target {target!r}: it has no {MANIFEST}")
    try:
        text = (folder / MANIFEST).read_text()
        written = json.loads(text)
        kind = written["checkpoint"].get("format") if "checkpoint" in written else written.get("format")
        if kind == FORMAT:
            written = content_of(text)
    except OSError as err:
        raise BuildError(f"{MANIFEST} of the checkpoint {path!r} cannot be read: {err.strerror}; load another one") from err
    except (ValueError, KeyError, AttributeError, TypeError) as err:
        raise BuildError(f"the checkpoint {path!r} is damaged: {MANIFEST} is not what was written; load another one") from err
    if kind != FORMAT:
        raise BuildError(
            f"{path!r} has format {kind}, this version reads format {FORMAT}; save it anew, or install a newer version"
        )
    if (whose := written["target"]) != target:
        raise BuildError(f"{path!r} is a checkpoint of target {whose!r}, and this engine is of {target!r}; load it there")
    return dict(written)


def has_foreign_manifest(folder: Path) -> bool:
    """Return True if a file of the manifest's name is not a manifest; a damaged manifest still has its keys."""
    try:
        text = (folder / MANIFEST).read_text(errors="replace")
    except OSError:
        return False
    return not any(mark in text for mark in ('"sha256"', '"checkpoint"'))


def target_of(folder: Path) -> str | None:
    """Return the target of a folder's checkpoint; None if there is no readable one."""
    content = content_in(folder)
    return None if content is None else str(content.get("target"))


def data_of(folder: Path) -> str | None:
    """Return the data sub-folder of a folder's checkpoint, ``""`` without a checkpoint, or None if it is unreadable."""
    content = content_in(folder)
    if content is not None:
        return str(content.get("data"))
    return None if (folder / MANIFEST).exists() else ""


def content_in(folder: Path) -> dict[str, Any] | None:
    """Return the content of a folder's manifest; None if there is no readable one."""
    try:
        return content_of((folder / MANIFEST).read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None
