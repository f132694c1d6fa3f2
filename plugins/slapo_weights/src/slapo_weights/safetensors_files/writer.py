"""Writer of a safetensors file: tensors are written in any order, at the offsets in its header."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from slapo_core import BuildError

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
