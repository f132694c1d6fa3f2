"""One safetensors file, written tensor by tensor at the places that its header gives them."""

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
"""What is no tensor in a header."""
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


class Layout(NamedTuple):
    """What a tensor is in a file.

    Args:
        name: In the file.
        shape: Its shape.
        dtype: Its type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self) -> None:
        """Raise ``BuildError`` for a type that the format lacks."""
        if self.dtype not in DTYPES:
            raise BuildError(
                f"export_weights: {self.name!r} is of {self.dtype}, which safetensors have no name for; give dtype="
            )


class SafetensorsFile:
    """A file whose tensors are known and whose numbers are not yet.

    Args:
        path: Where it is made.
        tensors: All that it holds; the widest types come first, so that each number lies at a multiple of its width.
    """

    def __init__(self, path: Path, tensors: Iterable[Layout]) -> None:
        self._places: dict[str, tuple[int, Layout]] = {}
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
            self.drop()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one of its tensors, which is on the CPU."""
        start, layout = self._places.pop(name)
        assert (tuple(tensor.shape), tensor.dtype) == (layout.shape, layout.dtype), (name, tensor.shape, tensor.dtype)
        self._stream.seek(self._begin + start)
        self._stream.write(as_bytes(tensor).numpy().data)

    def close(self) -> None:
        """Have all of it on the disk."""
        assert not self._places, f"without {sorted(self._places)}"
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def drop(self) -> None:
        """Write no more of it."""
        with suppress(OSError):  # of what it has not written yet, which the disk may be too full for
            self._stream.close()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in a row."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
