"""Reader of DeepSpeed's checkpoints by original names: any part of any tensor, located by the ``places`` files."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slapo_core import BuildError
from slapo_training.model import Chunk, Piece, Ranges

from .tensor_index import WEIGHT, name_of

SAME_LAYOUT = "load it on the layout and with the stage of ZeRO that it was saved with"


class _FileRange(NamedTuple):
    """Elements in a file: at ``start`` in a part, and at ``offset`` in the tensor under the keys ``at``."""

    start: int
    size: int
    file: str
    at: tuple[Any, ...]
    offset: int


class _Part(NamedTuple):
    """Shard of a tensor as saved by all replicas of one pipeline stage and tensor-parallel rank together."""

    full_shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    found: dict[str, list[_FileRange]]


class CheckpointReader:
    """Checkpoint of some number of ranks whose tensors are read by original names.

    Raises:
        BuildError: the checkpoint cannot be loaded on another layout.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self.places = [torch.load(folder / name_of(place), weights_only=True) for place in range(ranks)]
        for each in self.places:
            if each["why_not"]:
                raise BuildError(f"the checkpoint is of {each['why_not']}, which no other layout takes; {SAME_LAYOUT}")
        self.parts: dict[str, dict[Any, _Part]] = {}
        for each in self.places:
            for name, (shape, ranges) in each["pieces"].items():
                self.parts.setdefault(name, {}).setdefault((shape, ranges), _Part(shape, ranges, {}))
            for name, key, *found in each["found"]:
                self.parts[name][each["pieces"][name]].found.setdefault(key, []).append(_FileRange(*found))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: next(iter(parts.values())).full_shape for name, parts in self.parts.items()}

    def keys(self, name: str) -> set[str]:
        """Return the optimizer states that have a number for each element of a parameter."""
        return {key for part in self.parts[name].values() for key in part.found} - {WEIGHT}

    def read(self, name: str, key: str, wanted: Piece, start: int, size: int) -> torch.Tensor:
        """Read a range of a shard's elements, flat; only rows that contain some of them are read from the files.

        ``key`` is an optimizer state, or ``WEIGHT``. ``wanted`` is the position of the shard, ``start`` the offset in it.

        Raises:
            BuildError: the checkpoint lacks some elements.
        """
        if wanted.ranges:
            row = wanted.tensor[0].numel()
            first = start // row
            wanted, start = wanted.rows(first, -(-(start + size) // row)), start - first * row
        made: torch.Tensor | None = None
        has = torch.zeros(wanted.tensor.shape, dtype=torch.bool)
        for part in self.parts[name].values():
            if key not in part.found or bool(has.all()):
                continue
            source, before = _overlapping_rows(part, wanted)
            if source is None:
                continue
            local, known = self._local(part.found[key], source.tensor.shape, before)
            made = torch.empty(wanted.tensor.shape, dtype=local.dtype) if made is None else made
            for one, other in _common_boxes(source, wanted):
                other.of(made).copy_(one.of(local))
                other.of(has).logical_or_(one.of(known))
        if made is None or not has.all():
            what = f"the state {key!r} of {name!r}" if key else repr(name)
            raise BuildError(f"the checkpoint has {int(has.sum())} of {has.numel()} numbers of {what}; load another one")
        return made.view(-1).narrow(0, start, size)

    def _local(self, found: list[_FileRange], shape: torch.Size, before: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some rows of a part as saved by all replicas, and a mask of the elements that were found.

        ``before`` is the number of the part's elements before the rows.
        """
        line, known = torch.empty(0), torch.zeros(shape.numel(), dtype=torch.bool)
        for each in found:
            first, last = max(each.start, before), min(each.start + each.size, before + shape.numel())
            if first >= last and len(line):
                continue
            numbers = self._tensor(each).reshape(-1)
            if not len(line):
                line = torch.empty(shape.numel(), dtype=numbers.dtype)
            if first < last:
                own = slice(first - before, last - before)
                line[own].copy_(numbers[each.offset + first - each.start : each.offset + last - each.start])
                known[own].fill_(True)
        return line.view(shape), known.view(shape)

    def _tensor(self, found: _FileRange) -> Any:
        value = self.file(found.file)
        for key in found.at:
            value = value[key]
        return value.detach()

    def file(self, name: str) -> Any:
        """Return the content of one of DeepSpeed's files; tensors are memory-mapped if the format allows it."""
        if name not in self._files:
            path = self._folder / name
            options: dict[str, Any] = {"mmap": True} if zipfile.is_zipfile(path) else {}
            self._files[name] = torch.load(path, map_location="cpu", weights_only=False, **options)
        return self._files[name]

    def numbers(self, name: str) -> dict[str, set[tuple[Any, Any]]]:
        """Return the scalar states of a parameter: the distinct values over the ranks, each with its dtype; one is expected."""
        found: dict[str, set[tuple[Any, Any]]] = {}
        for each in self.places:
            for key, value in each["numbers"].get(name, {}).items():
                found.setdefault(key, set()).add(value)
        return found

    def unsupported_state(self, name: str) -> str:
        """Return a state that is neither a scalar nor has a number for each element, or ''."""
        return next((key for each in self.places for key in each["odd"].get(name, ())), "")


def _overlapping_rows(part: _Part, wanted: Piece) -> tuple[Piece | None, int]:
    """Return the rows of a part that overlap ``wanted``, or None, and the number of the part's elements before them."""
    sizes = [sum(stop - start for start, stop in each) for each in part.ranges]
    source = Piece(torch.empty(sizes, device="meta"), part.full_shape, part.ranges)
    boxes = [one for one, _ in _common_boxes(source, wanted)]
    if not boxes or not part.ranges:
        return (source if boxes else None), 0
    first, last = min(box.local[0] for box in boxes), max(box.local[0] + box.sizes[0] for box in boxes)
    return source.rows(first, last), first * source.tensor[0].numel()


def _common_boxes(source: Piece, wanted: Piece) -> Iterator[tuple[Chunk, Chunk]]:
    """Yield the boxes that both pieces contain, as a chunk of each."""
    for one in source.chunks():
        for other in wanted.chunks():
            first, second = one.inside(other.offset, other.sizes), other.inside(one.offset, one.sizes)
            if first is not None and second is not None:
                yield first, second
