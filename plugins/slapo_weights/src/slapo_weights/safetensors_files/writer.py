"""Writers of a safetensors file, and of a model folder in Hugging Face layout whose weights are replaced atomically."""

from __future__ import annotations

import filecmp
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike, fspath
from pathlib import Path
from typing import NamedTuple

import torch

from slapo_core import BuildError

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


METADATA = "__metadata__"
"""Key of a header that names no tensor."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the types in the format."""


class TensorEntry(NamedTuple):
    """A tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self) -> None:
        """Raise ``BuildError`` for a type that the format lacks."""
        if self.dtype not in DTYPES:
            raise BuildError(
                f"export_weights: {self.name!r} is of {self.dtype}, which safetensors have no name for; give dtype="
            )


class SafetensorsFile:
    """A file whose header is written first, and its tensors later, the widest dtypes first so that all are aligned."""

    def __init__(self, path: Path, tensors: Iterable[TensorEntry]) -> None:
        self._places: dict[str, tuple[int, TensorEntry]] = {}
        end, entries = 0, {}
        for each in sorted(tensors, key=lambda each: (-each.dtype.itemsize, each.name)):
            entries[each.name] = {
                "dtype": DTYPES[each.dtype],
                "shape": list(each.shape),
                "data_offsets": [end, end + each.size],
            }
            self._places[each.name] = end, each
            end += each.size
        header = json.dumps({METADATA: {"format": "pt"}, **entries}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._begin = 8 + len(header)
        self._stream = path.open("wb")
        try:
            self._stream.write(len(header).to_bytes(8, "little") + header)
            self._stream.truncate(self._begin + end)
        except OSError:
            self.abort()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one of its tensors, given on the CPU."""
        start, entry = self._places.pop(name)
        assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), (name, tensor.shape, tensor.dtype)
        self._stream.seek(self._begin + start)
        self._stream.write(as_bytes(tensor).numpy().data)

    def close(self) -> None:
        """Sync the file to disk and close it."""
        assert not self._places, f"without {sorted(self._places)}"
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def abort(self) -> None:
        """Close the file without its missing tensors."""
        with suppress(OSError):  # closing flushes buffered data, which fails on a full disk
            self._stream.close()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, flat."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
