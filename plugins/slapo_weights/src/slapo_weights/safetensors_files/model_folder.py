"""A folder as Hugging Face keeps models, whose weights are replaced in one moment."""

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

from .writer import Layout, SafetensorsFile

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")
_ASIDE = ".export-"


class Folder:
    """An export that is being written aside.

    The new files lie in a folder inside, ``.export-…``, until they are complete. Then they are renamed into their places:
    shards first, under names that no shard there has, then the configs, then what decides which weights are read, the index
    or the single file, in one moment. Old shards are removed behind that. Where a config changes, what decided before is moved
    into ``.export-…/before`` first, so that in between there are no weights rather than some of another config.

    Args:
        path: Made where there is none; other files in it stay as they are.
        files: The tensors of each file.

    Raises:
        BuildError: it is a file.
    """

    def __init__(self, path: str | PathLike[str], files: list[list[Layout]]) -> None:
        self.path = Path(path)
        check_folder(path)
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(f"{_ASIDE}*"):
            shutil.rmtree(left, ignore_errors=True)
        number = uuid.uuid4().hex[:8]
        self.aside = self.path / (_ASIDE + number)
        self.aside.mkdir()
        self._files: dict[str, SafetensorsFile] = {}
        self._names = self._chosen(len(files), number)
        self._where = {layout.name: name for name, layouts in zip(self._names, files, strict=True) for layout in layouts}
        self._layouts = [layout for layouts in files for layout in layouts]
        try:
            for name, layouts in zip(self._names, files, strict=True):
                self._files[name] = SafetensorsFile(self.aside / name, layouts)
        except Exception:
            self.drop()
            raise

    def _chosen(self, count: int, number: str) -> list[str]:
        if count == 1:
            return [SINGLE]
        names = [f"model-{each:05}-of-{count:05}.safetensors" for each in range(1, count + 1)]
        taken = any((self.path / name).exists() for name in names)
        return [name.replace("model-", f"model-{number}-", 1) for name in names] if taken else names

    def file_of(self, name: str) -> SafetensorsFile:
        """The file that has a tensor."""
        return self._files[self._where[name]]

    def seal(self, parameters: int) -> None:
        """Put everything in its place, once it is on the disk.

        Args:
            parameters: How many numbers the parameters have together.
        """
        for file in self._files.values():
            file.close()
        if len(self._names) > 1:
            size = sum(layout.size for layout in self._layouts)
            index = {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": self._where}
            (self.aside / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for each in self.aside.iterdir():
            _sync(each)
        last = SINGLE if len(self._names) == 1 else INDEX
        shards = [name for name in self._names if name != SINGLE]
        others = sorted(each.name for each in self.aside.iterdir() if each.name not in (*self._names, INDEX))
        with self._away([name for name in others if self._changes(name)]):
            for name in [*shards, *others, last]:
                os.replace(self.aside / name, self.path / name)
        if last == INDEX:
            (self.path / SINGLE).unlink(missing_ok=True)  # it would be read before the index
        else:
            (self.path / INDEX).unlink(missing_ok=True)
        _sync(self.path)
        for each in self.path.iterdir():
            if _SHARD.fullmatch(each.name) and each.name not in shards:
                each.unlink(missing_ok=True)
        shutil.rmtree(self.aside)

    def _changes(self, name: str) -> bool:
        """Whether a file that is there gets another content."""
        return (self.path / name).exists() and not filecmp.cmp(self.path / name, self.aside / name, shallow=False)

    @contextmanager
    def _away(self, configs: list[str]) -> Iterator[None]:
        """Have no weights there while configs change, so that none are read with a config of others; all back on an error."""
        weights = [name for name in (SINGLE, INDEX) if configs and (self.path / name).exists()]
        before = self.aside / "before"
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

    def drop(self) -> None:
        """Remove what was written aside."""
        for file in self._files.values():
            file.drop()
        shutil.rmtree(self.aside, ignore_errors=True)


def check_folder(path: str | PathLike[str]) -> None:
    """Raise ``BuildError`` for what is no folder and cannot become one."""
    if os.path.exists(path) and not os.path.isdir(path):
        raise BuildError(f"export_weights: {fspath(path)!r} is a file; give a folder")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
