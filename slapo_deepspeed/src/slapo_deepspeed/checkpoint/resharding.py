"""Resharding on load, for another layout or stage of ZeRO: each rank reads its part of each tensor by its original name.

The ``places`` files say where DeepSpeed's files have each tensor.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slapo_core import BuildError, Program, gather_objects
from slapo_training.engines import check_shapes
from slapo_training.model import Chunk, Piece, Ranges

from ..optimizer.local_tensors import Share, Shares
from ..process_state._deepspeed_private import COUNTERS, loss_scaler, set_counters
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


class ReshardedState:
    """Data that an engine reads from a checkpoint; the engine is unchanged until ``put``. The constructor is collective."""

    def __init__(self, model: Any, shares: Shares, program: Program) -> None:
        self._model, self._shares = model, shares
        self._groups = self._shares.groups()
        named = {name: piece.full_shape for name, piece in self._shares.pieces.items()}
        everyone = gather_objects((named, [name for group in self._groups for name in group["names"]]), program.mesh)
        self._shapes = {name: shape for own, _ in everyone for name, shape in own.items()}
        self._stepped = {name for _, own in everyone for name in own}
        self._options: list[dict[str, Any]] = []
        self._weights: list[torch.Tensor] = []
        self._states: dict[int, dict[str, Any]] = {}
        self._common: Mapping[str, Any] = {}
        self._scale: Any = None

    def read(self, saved: CheckpointReader) -> None:
        """Read this rank's data. Not collective.

        Raises:
            BuildError: the checkpoint is of another model, or of an optimizer whose states do not fit.
        """
        check_shapes(saved.shapes(), self._shapes)
        if self._shares.optimizer is not None:
            self._options = self._group_options(saved)
        self._common = self._chosen_common(saved)
        self._scale = next((each["scale"] for each in saved.places if each["scale"] is not None), None)
        self._weights = [self._read_elements(saved, share, WEIGHT) for share in self._shares.held]
        stepped: dict[int, tuple[torch.Tensor, list[Share]]] = {}
        for share in self._shares.held:
            if share.stepped is not None:
                stepped.setdefault(id(share.stepped), (share.stepped, []))[1].append(share)
        for number, (tensor, shares) in stepped.items():
            if state := self._state(saved, tensor, shares):
                self._states[number] = state

    @torch.no_grad()
    def put(self) -> None:
        with self._shares.write_context():
            for share, numbers in zip(self._shares.held, self._weights, strict=True):
                share.value.copy_(numbers.view(share.value.shape))
            if self._shares.optimizer is not None:
                self._shares.put_states(self._states, self._options)
        scaler = loss_scaler(self._model)
        if getattr(scaler, "dynamic", False) and self._scale is not None and self._scale[0] == type(scaler).__name__:
            vars(scaler).update(self._scale[1])
        if self._model.lr_scheduler is not None:
            self._model.lr_scheduler.load_state_dict(self._common["lr_scheduler"])
        set_counters(self._model, self._common)

    def _read_elements(self, saved: CheckpointReader, share: Share, key: str) -> torch.Tensor:
        return saved.read(share.name, key, self._shares.pieces[share.name], share.start, share.value.numel())

    def _state(self, saved: CheckpointReader, stepped: torch.Tensor, shares: list[Share]) -> dict[str, Any]:
        """Return the optimizer's state for one stepped tensor; elements without a saved state get zeros."""
        state: dict[str, Any] = {}
        found: dict[str, dict[tuple[Any, Any], str]] = {}
        for share in shares:
            for key in saved.keys(share.name):
                numbers = self._read_elements(saved, share, key)
                if key not in state:
                    state[key] = torch.zeros(stepped.shape, dtype=numbers.dtype)
                part = share.of(state[key])
                part.copy_(numbers.view(part.shape))
            for key, values in saved.numbers(share.name).items():
                found.setdefault(key, {}).update(dict.fromkeys(values, share.name))
        for key, by_value in found.items():
            (value, kind), *others = by_value
            if others:
                names = " and ".join(f"{each[0]} for {name!r}" for each, name in [*by_value.items()][:2])
                raise BuildError(f"the optimizer's {key!r} is {names}, which stages of ZeRO keep once; {SAME_LAYOUT}")
            state[key] = value if kind is None else torch.tensor(value, dtype=kind)
        return state

    def _group_options(self, saved: CheckpointReader) -> list[dict[str, Any]]:
        """Return the saved options of this rank's groups.

        Raises:
            BuildError: the optimizer had other parameters or states of other shapes, or parameters of one group had
                different options.
        """
        options: dict[str, dict[str, Any]] = {}
        for each in saved.places:
            for group in each["groups"]:
                options |= dict.fromkeys(group["names"], group["options"])
        for name in sorted(options.keys() ^ self._stepped):
            where = "the checkpoint's, not this engine's" if name in options else "this engine's, not the checkpoint's"
            raise BuildError(f"{name!r} is in a group of {where} optimizer; build with the same parameters to train")
        for name in sorted(self._stepped):
            if odd := saved.unsupported_state(name):
                raise BuildError(
                    f"{odd!r} in the state of {type(self._shares.optimizer).__name__} is not a number for each element of "
                    f"{name!r}; {SAME_LAYOUT}"
                )
        found = []
        for number, group in enumerate(self._groups):
            if not group["names"]:
                places = (each["groups"] for each in saved.places if len(each["groups"]) == len(self._groups))
                found.append(next((each[number]["options"] for each in places), group["options"]))
                continue
            own = {repr(options[name]): options[name] for name in group["names"]}
            if len(own) > 1:
                raise BuildError("the checkpoint's optimizer has other groups of parameters; build with the same")
            found.append(next(iter(own.values())))
        return found

    def _chosen_common(self, saved: CheckpointReader) -> dict[str, Any]:
        """Return the counters and the state of the learning-rate schedule, from a rank with the same group options.

        Raises:
            BuildError: no rank had groups with the same options.
        """
        wanted = [repr(each) for each in self._options]
        for each in saved.places:
            is_one = self._model.lr_scheduler is None or [repr(group["options"]) for group in each["groups"]] == wanted
            if each["common"] is not None and is_one:
                whole = saved.file(each["common"])
                return {key: whole[key] for key in (*COUNTERS, "lr_scheduler")}
        raise BuildError(
            f"the learning rate's schedule was saved of other groups of parameters than the {len(wanted)} of this rank's "
            f"stage; {SAME_LAYOUT}"
        )
