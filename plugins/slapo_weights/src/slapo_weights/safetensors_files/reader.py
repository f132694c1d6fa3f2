"""Reader of safetensors files in Hugging Face layout: their tensors, and boxes of these.

Reads are unbuffered, so only the requested bytes are read, and no file is mapped into memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from io import FileIO
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slapo_core import BuildError

from .writer import DTYPES, METADATA

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SAMPLE = 64
"""Bytes of each tensor in a digest."""
_MAX_HEADER = 100_000_000
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class TensorHeader(NamedTuple):
    """One tensor of a file, in row-major order from the byte ``start`` on."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightFiles:
    """The tensors of one safetensors file, of an index, or of a folder with either.

    Args:
        source: The file, the index (``.json``) or the folder.

    Attributes:
        entries: Name of a tensor to its header.
        bytes_read: Bytes of tensors that ``read`` has read.

    Raises:
        BuildError: no such file, a damaged file, a pickle, or an index that does not match its files.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self.source, self.bytes_read = Path(source), 0
        self.entries: dict[str, TensorHeader] = {}
        entry = _entry(self.source)
        listed = _read_index(entry) if entry.suffix == ".json" else {}
        for path in dict.fromkeys(listed.values()) if listed else [entry]:
            if listed and not os.path.exists(path):
                raise BuildError(f"{entry} names the file {path.name}, which is not beside it")
            for name, found in _tensors(path):
                if name in self.entries:
                    raise BuildError(f"{name} is in {self.entries[name].path} and in {path}; one of them has to go")
                self.entries[name] = found
        astray = [name for name, path in listed.items() if name not in self.entries or self.entries[name].path != path]
        if astray:
            raise BuildError(f"{entry} names {len(astray)} tensors that its files lack: {', '.join(sorted(astray)[:5])}")
        if listed and (extra := sorted(self.entries.keys() - listed.keys())):
            raise BuildError(f"the files of {entry} hold {len(extra)} tensors that it does not name: {', '.join(extra[:5])}")

    def digest(self) -> str:
        """Return a digest of names, dtypes and shapes, and of a few bytes in the middle of each tensor.

        Ranks compare files at different paths by it, without reading all of them.

        Raises:
            BuildError: a file cannot be read, or ends too early.
        """
        told: dict[str, bytes] = {}
        by_path: dict[Path, list[str]] = {}
        for name, entry in self.entries.items():
            by_path.setdefault(entry.path, []).append(name)
        for path, names in by_path.items():
            try:
                with open(path, "rb", buffering=0) as file:
                    told.update({name: _sample(file, self.entries[name]) for name in names})
            except OSError as err:
                raise BuildError(f"cannot read {path}: {err}") from err
        facts = [(name, self.entries[name].dtype, self.entries[name].shape, told[name]) for name in sorted(told)]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def read(self, name: str, starts: Sequence[int], sizes: Sequence[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a box of a tensor, in the file's dtype, on the CPU; only its bytes are read.

        ``out`` is a contiguous tensor of that shape and dtype to read into.

        Raises:
            BuildError: the file cannot be read, or ends too early.
        """
        entry = self.entries[name]
        result = torch.empty(tuple(sizes), dtype=entry.dtype) if out is None else out
        if not result.numel():
            return result
        buffer = memoryview(result.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        try:
            with open(entry.path, "rb", buffering=0) as file:
                at = 0
                for start, size in _byte_runs(entry.shape, starts, sizes, entry.dtype.itemsize):
                    _fill(file, buffer[at : at + size], entry.start + start)
                    at += size
        except OSError as err:
            raise BuildError(f"cannot read {name} from {entry.path}: {err}") from err
        self.bytes_read += at
        return result


def _byte_runs(shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int], width: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length in bytes of each contiguous run of a box."""
    split = len(shape)
    while split and starts[split - 1] == 0 and sizes[split - 1] == shape[split - 1]:
        split -= 1
    strides = [prod(shape[dim + 1 :]) * width for dim in range(len(shape))]
    if not split:
        yield 0, prod(shape) * width
        return
    last = split - 1
    first, length = starts[last] * strides[last], sizes[last] * strides[last]
    lines = [range(starts[dim] * strides[dim], (starts[dim] + sizes[dim]) * strides[dim], strides[dim]) for dim in range(last)]
    for place in product(*lines):
        yield sum(place) + first, length


def _sample(file: FileIO, entry: TensorHeader) -> bytes:
    size = prod(entry.shape) * entry.dtype.itemsize
    found = bytearray(min(size, _SAMPLE))
    _fill(file, memoryview(found), entry.start + (size - len(found)) // 2)
    return bytes(found)


def _fill(file: FileIO, buffer: memoryview, offset: int) -> None:
    file.seek(offset)
    while len(buffer):
        if not (count := file.readinto(buffer)):
            raise OSError("it ends too early")
        buffer = buffer[count:]


def _entry(source: Path) -> Path:
    """Return the single file or the index of a source."""
    if not os.path.exists(source):
        raise BuildError(f"no weights at {source}: there is no such file or folder; download weights from a hub first")
    if not source.is_dir():
        if source.suffix not in (".safetensors", ".json"):
            raise BuildError(f"{source} is not a safetensors file; {_CONVERT}")
        return source
    for name in (_SINGLE, _INDEX):
        if (source / name).exists():
            return source / name
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth", "*.bin.index.json") for file in source.glob(kind))
    if pickles:
        raise BuildError(f"{source} has weights as pickles only, {pickles[0]}, which run code when read; {_CONVERT}")
    others = sorted(file.name for kind in ("*.safetensors", "*.safetensors.index.json") for file in source.glob(kind))
    hint = f"; give the path of {others[0]}, if it is that" if others else ""
    raise BuildError(f"no weights in {source}; it has neither {_SINGLE} nor {_INDEX}{hint}")


_CONVERT = "convert it with Transformers' from_pretrained and save_pretrained"


def _read_index(index: Path) -> dict[str, Path]:
    """Return tensor name to file, from an index."""
    try:
        table = json.loads(index.read_text())["weight_map"]
        files = {str(name): str(file) for name, file in table.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as err:
        raise BuildError(f"{index} is not an index of safetensors files: {type(err).__name__}: {err}") from err
    if outside := next((file for file in files.values() if Path(file).name != file), None):
        raise BuildError(f"{index} names {outside!r}, which is not in its folder")
    if not files:
        raise BuildError(f"{index} names no tensors")
    return {name: index.parent / file for name, file in files.items()}


def _tensors(path: Path) -> Iterator[tuple[str, TensorHeader]]:
    """Yield the tensors in a file's header, checked against the file's size."""
    damaged = f"{path} is not a whole safetensors file"
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ValueError("its header is longer than the file")
            header: Any = json.loads(file.read(length))
            if not isinstance(header, dict):
                raise ValueError("its header is not a table")
    except (OSError, ValueError, RecursionError) as err:
        raise BuildError(f"{damaged}: {err}") from err
    header.pop(METADATA, None)
    found = []
    for name, told in header.items():
        try:
            dtype, (start, stop), shape = str(told["dtype"]), told["data_offsets"], tuple(told["shape"])
            if any(type(number) is not int for number in (start, stop, *shape)):
                raise TypeError("no whole numbers")
        except (LookupError, TypeError, ValueError) as err:
            raise BuildError(f"{damaged}: what it says of {name} cannot be read") from err
        if min(shape, default=0) < 0:
            raise BuildError(f"{damaged}: what it says of {name} cannot be read")
        if dtype not in _DTYPES:
            raise BuildError(f"{path} holds {name} as {dtype}, which no torch tensor is; {_CONVERT}")
        found.append((start, stop, name, TensorHeader(path, 8 + length + start, _DTYPES[dtype], shape)))
    end = 0
    for start, stop, name, entry in sorted(found, key=lambda each: each[:2]):
        if start != end or stop - start != prod(entry.shape) * entry.dtype.itemsize:
            raise BuildError(f"{damaged}: {name} does not lie where it says")
        end = stop
        yield name, entry
    if size != 8 + length + end:
        raise BuildError(f"{damaged}: it has {size} bytes and its header says {8 + length + end}")
