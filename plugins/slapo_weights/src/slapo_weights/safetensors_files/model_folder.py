"""A model folder in Hugging Face layout whose weights are replaced atomically."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path

from slapo_core import BuildError

from .writer import SafetensorsFile, TensorEntry

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")
_STAGING = ".export-"


class ModelFolder:
    """An export that is staged inside its folder.

    New files are written to ``.export-…`` inside the folder. When they are complete they are renamed into place: first shards,
    under unused names; then configs; last the index or single file, which decides which weights are read. Old shards are
    removed after that. If a config changes, the old index or file is first moved to ``.export-…/before``: in between the folder
    has no weights, rather than weights of another config.

    Args:
        path: The folder, which is made if it does not exist; other files in it do not change.
        files: The tensors of each file.

    Raises:
        BuildError: the path is a file.
    """

    def __init__(self, path: str | PathLike[str], files: list[list[TensorEntry]]) -> None:
        self.path = Path(path)
        check_folder(path)
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(f"{_STAGING}*"):
            shutil.rmtree(left, ignore_errors=True)
        number = uuid.uuid4().hex[:8]
        self.staging = self.path / (_STAGING + number)
        self.staging.mkdir()
        self._files: dict[str, SafetensorsFile] = {}
        self._names = self._file_names(len(files), number)
        self._where = {entry.name: name for name, entries in zip(self._names, files, strict=True) for entry in entries}
        self._entries = [entry for entries in files for entry in entries]
        try:
            for name, entries in zip(self._names, files, strict=True):
                self._files[name] = SafetensorsFile(self.staging / name, entries)
        except Exception:
            self.abort()
            raise

    def _file_names(self, count: int, number: str) -> list[str]:
        if count == 1:
            return [SINGLE]
        names = [f"model-{each:05}-of-{count:05}.safetensors" for each in range(1, count + 1)]
        taken = any((self.path / name).exists() for name in names)
        return [name.replace("model-", f"model-{number}-", 1) for name in names] if taken else names

    def file_of(self, name: str) -> SafetensorsFile:
        return self._files[self._where[name]]

    def commit(self, parameters: int) -> None:
        """Sync the files to disk and rename them into place; ``parameters`` is the total number of their elements."""
        for file in self._files.values():
            file.close()
        if len(self._names) > 1:
            size = sum(entry.size for entry in self._entries)
            index = {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": self._where}
            (self.staging / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for each in self.staging.iterdir():
            _fsync(each)
        last = SINGLE if len(self._names) == 1 else INDEX
        shards = [name for name in self._names if name != SINGLE]
        others = sorted(each.name for each in self.staging.iterdir() if each.name not in (*self._names, INDEX))
        old = [name for name in others if (self.path / name).exists()]
        changed = [name for name in old if not filecmp.cmp(self.path / name, self.staging / name, shallow=False)]
        with self._without_weights(changed):
            for name in [*shards, *others, last]:
                os.replace(self.staging / name, self.path / name)
        if last == INDEX:
            (self.path / SINGLE).unlink(missing_ok=True)  # it would be read before the index
        else:
            (self.path / INDEX).unlink(missing_ok=True)
        _fsync(self.path)
        for each in self.path.iterdir():
            if _SHARD.fullmatch(each.name) and each.name not in shards:
                each.unlink(missing_ok=True)
        shutil.rmtree(self.staging)

    @contextmanager
    def _without_weights(self, configs: list[str]) -> Iterator[None]:
        """Move the weights away while configs change, so that none are read with another config; restore all on an error."""
        weights = [name for name in (SINGLE, INDEX) if configs and (self.path / name).exists()]
        before = self.staging / "before"
        before.mkdir()
        try:
            for name in [*weights, *configs]:
                os.replace(self.path / name, before / name)
            yield
        except Exception:
            for name in [*configs, *weights]:
                if (before / name).exists():
                    os.replace(before / name, self.path / name)
            raise

    def abort(self) -> None:
        for file in self._files.values():
            file.abort()
        shutil.rmtree(self.staging, ignore_errors=True)


def check_folder(path: str | PathLike[str]) -> None:
    if os.path.exists(path) and not os.path.isdir(path):
        raise BuildError(f"export_weights: {fspath(path)!r} is a file; give a folder")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
