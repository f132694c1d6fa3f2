"""Origin of each exported tensor, its name in the unmodified model, and the boxes that each rank sends to the first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import torch

from slapo_core import BuildError
from slapo_training.model import Chunk, Piece, Ranges, Span, chunks_of, spans_of, with_dim

from ..huggingface.unmodified_model import UnmodifiedModel
from ..tensor_views.fused_parameters import FusedParts
from .export_source import ExportSource


class PieceDescription(NamedTuple):
    """A piece without its values; ``dtype`` is that in which the rank runs it."""

    full_shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    dtype: torch.dtype
    is_empty: bool

    @classmethod
    def of(cls, piece: Piece, dtype: torch.dtype) -> PieceDescription:
        return cls(tuple(piece.full_shape), piece.ranges, dtype, piece.tensor.numel() == 0)

    def chunks(self) -> Iterator[Chunk]:
        sizes = [sum(stop - start for start, stop in ranges) for ranges in self.ranges]
        shape = [0] if self.is_empty else sizes
        yield from Piece(torch.empty(shape, device="meta"), self.full_shape, self.ranges).chunks()


class SentBox(NamedTuple):
    """A box that the rank of index ``place`` sends."""

    place: int
    chunk: Chunk


@dataclass(frozen=True)
class WholeTensor:
    """A tensor, without padded rows, that the first rank assembles of ``parts``. It is sent in ``dtype``."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[SentBox, ...]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def description_of(name: str, everyone: Sequence[Mapping[str, PieceDescription]]) -> PieceDescription | None:
    """Return the description of a tensor that a rank holds, or None; raise ``BuildError`` if shapes or dtypes differ."""
    found = [own[name] for own in everyone if name in own]
    for facts in ({each.full_shape for each in found}, {each.dtype for each in found}):
        if len(facts) > 1:
            both = " and ".join(sorted(map(str, facts))[:2])
            raise BuildError(f"export_weights: the ranks have {name!r} as {both}; give every rank the same model")
    return found[0] if found else None


def whole_of(
    name: str, origin: Origin, everyone: Sequence[Mapping[str, PieceDescription]], shape: tuple[int, ...], dtype: torch.dtype
) -> WholeTensor:
    """Choose the boxes that cover a tensor within a shape, without padded rows, each from the first rank that has it.

    Raises:
        BuildError: the pieces do not cover the tensor.
    """
    held = [(place, own[origin.key].chunks()) for place, own in enumerate(everyone) if origin.key in own]
    zeros = (0,) * len(shape)
    pieces = [
        (place, [part for chunk in origin.chunks(chunks) if (part := chunk.inside(zeros, shape)) is not None])
        for place, chunks in held
    ]
    edges = [{0, size} for size in shape]
    for _, chunks in pieces:
        for chunk in chunks:
            for line, start, size in zip(edges, chunk.offset, chunk.sizes, strict=True):
                line |= {start, start + size}
    lines = [[*pairwise(sorted(line))] for line in edges]
    left = set(product(*lines))
    parts: list[SentBox] = []
    for place, chunks in pieces:
        for chunk in chunks:
            covered = {cell for cell in left if _is_inside(cell, chunk)} if left else set()
            if covered:
                left -= covered
                parts.append(SentBox(place, chunk))
    if left:
        missing = sum(math.prod(stop - start for start, stop in cell) for cell in left)
        raise BuildError(
            f"export_weights: no rank has {missing} of the {math.prod(shape)} numbers of {name!r}; build an engine of the "
            "schedule, or call consolidate_model, to give them values"
        )
    return WholeTensor(origin.key, shape, dtype, tuple(parts))


def _is_inside(cell: tuple[tuple[int, int], ...], chunk: Chunk) -> bool:
    return all(
        start <= low and high <= start + size for (low, high), start, size in zip(cell, chunk.offset, chunk.sizes, strict=True)
    )


_SHOWN = 8


class Origin(NamedTuple):
    """Origin of a tensor.

    Args:
        is_added: Whether it is a parameter that a step added without declaring its parts.
        is_known: Whether the unmodified model had it; False for buffers that a step added.
        spans: Parts of the piece that it consists of; None for the whole piece.
    """

    key: str
    names: tuple[str, ...]
    is_added: bool = False
    is_known: bool = True
    spans: tuple[Span, ...] | None = None

    def chunks(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        return chunks_of(chunks, self.spans)

    def shape(self, full_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor, given that of the whole piece."""
        if self.spans is None:
            return full_shape
        return with_dim(full_shape, self.spans[0].dim, max(span.start + span.size for span in self.spans))


def origins(source: ExportSource, held: Iterable[str]) -> list[Origin]:
    """Return the origins of all parameters and of the buffers that some rank holds, in the order of ``state_dict``."""
    names, added, made, there = source.names(), source.added_parameters(), source.made_of(), dict.fromkeys(held)
    first_of = {name: first for first, all_names in added.items() for name in all_names}
    keys = (first_of.get(name, name) for name, is_buffer in source.order() if name in there or not is_buffer)
    found: list[Origin] = []
    for key in dict.fromkeys([*keys, *there]):
        if key in made:
            found += _parts(key, made[key])
        else:
            found.append(Origin(key, names.get(key) or added.get(key) or (key,), key in added, key in names))
    return found


def by_written_name(found: Iterable[Origin], unmodified: UnmodifiedModel | None) -> dict[str, Origin]:
    """Return the origins by the names that ``save_pretrained`` converts from, in the order of the unmodified model.

    A parameter that a step added is written only if a Transformers' model has a tensor of that name.

    Raises:
        BuildError: the scheduled model has tensors that the unmodified one lacks, or lacks some.
    """
    if unmodified is None:
        _refuse([origin for origin in found if origin.is_added])
        return _once((origin.names[0], origin) for origin in found)
    shapes, left_out = unmodified.shapes(), set(unmodified.model._keys_to_ignore_on_save or ())
    known = [origin for origin in found if origin.is_added or origin.is_known or origin.key in shapes]
    _refuse([origin for origin in known if origin.is_added and not shapes.keys() >= {*origin.names}])
    kept = unmodified.written_names(origin.names for origin in known)
    names = {name for origin in known for name in origin.names}
    if missing := [name for name in shapes if name not in names and name not in left_out]:
        raise BuildError(
            f"export_weights: the scheduled model lacks {_quote(missing)} of {unmodified.name}, which a step took out or put "
            "together with others without declaring it (made_of); export a schedule without that step"
        )
    chosen = _once((next((name for name in origin.names if name in kept), origin.names[0]), origin) for origin in known)
    ordered = dict.fromkeys(name for name in [*shapes, *chosen] if name in chosen and name not in left_out)
    return {name: chosen[name] for name in ordered}


def _parts(key: str, made: FusedParts) -> Iterator[Origin]:
    for name, spans, is_complete in spans_of(made.dim, made.parts):
        if not is_complete:
            raise BuildError(
                f"export_weights: {key!r} is declared to be made of {name!r} (made_of), but does not cover each part "
                "of it once; export a schedule without that step"
            )
        yield Origin(key, (name,), spans=spans)


def _once(named: Iterable[tuple[str, Origin]]) -> dict[str, Origin]:
    found: dict[str, Origin] = {}
    for name, origin in named:
        if (other := found.setdefault(name, origin)) is not origin:
            raise BuildError(f"export_weights: {other.key!r} and {origin.key!r} are both {name!r} of the unmodified model")
    return found


def _refuse(added: list[Origin]) -> None:
    if added:
        raise BuildError(
            f"export_weights: {_quote([each.key for each in added])} were added by a step that does not declare their origin "
            "(made_of), and the unmodified model has no tensor of that name; export a schedule without that step"
        )


def _quote(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
