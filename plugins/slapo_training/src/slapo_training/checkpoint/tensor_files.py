"""Tensors of all ranks in files of ``torch.distributed.checkpoint``, which can be read in any pieces.

The planners here do for pieces what torch's planners do for DTensors. A piece may consist of several boxes, and several ranks
may hold the same box. Replicated data is written once, balanced across ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slapo_core import BuildError

from ..distributed._torch_private import MetadataUnpickler
from ..distributed.ranks import Ranks
from ..model.pieces import Chunk, Piece
from .async_save import Buffers, copy_to_cpu, drop_other_buffers

Edges = dict[str, tuple[tuple[int, ...], ...]]
Tensors = dict[tuple[str, tuple[int, ...]], torch.Tensor]
Pieces = Mapping[str, Piece | Sequence[Piece]]
"""One piece, or several disjoint ones, of each tensor, by name."""


class TensorFiles:
    """Plan and writer of this rank's part of a checkpoint's tensors. Made collectively.

    ``copies`` are CPU buffers for copies of the tensors, new or from the last save; with None the tensors are written
    directly.
    """

    def __init__(self, pieces: Pieces, ranks: Ranks, copies: Buffers | None = None) -> None:
        self._edges, self._facts = _edges(pieces, ranks), _facts(pieces)
        self._planner = _SavePlanner(pieces, self._edges)
        plans, self._metadata = self._planner.create_global_plan(ranks.gather(self._planner.create_local_plan()))
        self._writer = FileSystemWriter(".", overwrite=False)
        self._plan = self._writer.prepare_global_plan(plans)[ranks.index]
        self._copy(ranks, copies)

    def fits(self, pieces: Pieces) -> bool:
        """Return True if pieces differ from the planned ones in values only; if so on all ranks, call ``renew``."""
        return _facts(pieces) == self._facts

    def renew(self, pieces: Pieces, ranks: Ranks, copies: Buffers | None = None) -> None:
        """Replace the pieces and keep the plan. Collective."""
        self._planner = _SavePlanner(pieces, self._edges)
        self._copy(ranks, copies)

    def _copy(self, ranks: Ranks, copies: Buffers | None) -> None:
        if copies is not None:
            ranks.run_on_all(lambda: self._planner.copy(self._plan, copies))

    def write(self, folder: Path, ranks: Ranks) -> None:
        """Write the files. Collective."""

        def put() -> list[Any]:
            self._writer.reset(folder)
            self._writer.set_up_storage_writer(ranks.index == 0)
            return self._writer.write_data(self._plan, self._planner).value()

        try:
            everyone = ranks.run_on_all(put)
        finally:
            self._planner.release_tensors()
        ranks.run_on_first(lambda: self._writer.finish(self._metadata, everyone))


class SavedTensors:
    """Tensors of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._reader = _Reader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)

    def facts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each tensor, by name."""
        found = self._metadata.state_dict_metadata.items()
        return {
            name: (tuple(each.size), each.properties.dtype) for name, each in found if isinstance(each, TensorStorageMetadata)
        }

    def read(self, wanted: Mapping[str, Piece]) -> None:
        """Read into the tensors of these pieces; raise ``BuildError`` if the checkpoint lacks elements of one."""
        planner = _LoadPlanner(wanted)
        planner.set_up_planner({}, self._metadata)
        plan = planner.create_local_plan()
        for name, piece in wanted.items():
            found = sum(math.prod(item.lengths) for item in plan.items if item.dest_index.fqn == name)
            if found != piece.tensor.numel():
                raise BuildError(f"the checkpoint has {found} of {piece.tensor.numel()} numbers of {name!r}; load another one")
        self._reader.read_data(plan, planner).wait()


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, pieces: Pieces, edges: Edges) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items: list[WriteItem] = []
        self._tensors: Tensors = {}
        for name, piece in _named_pieces(pieces):
            properties = TensorProperties(dtype=piece.tensor.dtype)
            for chunk in _disjoint_boxes(piece, edges[name]):
                box = ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.sizes))
                data = TensorWriteData(box, properties, torch.Size(piece.full_shape))
                self._items.append(WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD, tensor_data=data))
                self._tensors[name, chunk.offset] = chunk.of(piece.tensor)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def copy(self, plan: SavePlan, buffers: Buffers) -> None:
        """Replace the tensors by CPU copies of those in the plan."""
        kept = [_key(item.index) for item in plan.items]
        drop_other_buffers(kept, buffers)
        self._tensors = {key: copy_to_cpu(self._tensors[key], key, buffers) for key in kept}

    def release_tensors(self) -> None:
        """Drop references to tensors, so that the engine can free them."""
        self._tensors = {}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._tensors[_key(write_item.index)]


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, wanted: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._wanted = wanted
        self._places: Tensors = {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, piece in self._wanted.items():
            chunks = [*piece.chunks()]
            self._places |= {(name, chunk.offset): chunk.of(piece.tensor) for chunk in chunks}
            boxes = [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.sizes)) for chunk in chunks]
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, boxes)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._places[_key(index)]


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata file; its pickle may only have known classes of torch."""
        with Path(self.path, ".metadata").open("rb") as stream:
            found: Metadata = MetadataUnpickler(stream).load()
        return found


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    assert index.offset is not None
    return index.fqn, tuple(index.offset)


def _named_pieces(pieces: Pieces) -> Iterator[tuple[str, Piece]]:
    for name, found in pieces.items():
        for piece in [found] if isinstance(found, Piece) else found:
            yield name, piece


def _facts(pieces: Pieces) -> list[Any]:
    return [(name, piece.full_shape, piece.ranges, piece.tensor.dtype) for name, piece in _named_pieces(pieces)]


def _edges(pieces: Pieces, ranks: Ranks) -> Edges:
    """Return the edges of all ranks' ranges in each dimension of each tensor."""
    found: dict[str, list[set[int]]] = {}
    for own in ranks.gather([(name, piece.ranges) for name, piece in _named_pieces(pieces)]):
        for name, dims in own:
            known = found.setdefault(name, [set() for _ in dims])
            for edges, ranges in zip(known, dims, strict=True):
                edges.update(edge for each in ranges for edge in each)
    return {name: tuple(tuple(sorted(edges)) for edges in dims) for name, dims in found.items()}


def _disjoint_boxes(piece: Piece, edges: Sequence[Sequence[int]]) -> Iterator[Chunk]:
    """Iterate over the boxes of a piece, split at the edges of all ranks; boxes of two ranks are equal or disjoint."""
    if math.prod(piece.full_shape) == 0:
        yield Chunk((0,) * len(piece.full_shape), (0,) * len(piece.full_shape), piece.full_shape)
    for chunk in piece.chunks():
        lines = []
        for at, start, size, cuts in zip(chunk.local, chunk.offset, chunk.sizes, edges, strict=True):
            inside = [start, *(cut for cut in cuts if start < cut < start + size), start + size]
            lines.append([(at + low - start, low, high - low) for low, high in zip(inside, inside[1:], strict=False)])
        for box in product(*lines):
            yield Chunk(tuple(at for at, _, _ in box), tuple(start for _, start, _ in box), tuple(size for *_, size in box))
