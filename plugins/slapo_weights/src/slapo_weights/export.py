"""``export_weights``: trained weights in the names, shapes and files of the unmodified model, from any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike, fspath
from pathlib import Path

import torch
import torch.distributed as dist

from slapo_core import BuildError, Engine, Schedule, failure_reason, gather_objects, raise_on_all_ranks
from slapo_training.distributed import Ranks
from slapo_training.model import Piece

from .export_plan.export_source import Source
from .export_plan.plan import Plan, parsed_size, planned
from .export_plan.whole_tensors import Described, Sent, Whole
from .huggingface.save_conversion import Group, Tensors, outcome
from .safetensors_files.model_folder import Folder, check_folder
from .safetensors_files.writer import as_bytes


@torch.no_grad()
def export_weights(
    source: Engine | Schedule,
    folder: str | PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights as the unmodified model's ``save_pretrained`` would: ``from_pretrained(folder)`` gives the same model.

    Collective over the ranks of the engine or schedule; the first of them writes. One that gives neither knows of no others and
    fails alone, and these wait for it as long as their group does, or until its process ends. A model of Transformers gets its
    configs too, and the names and tensors that its class writes, which may be others than those in memory; any other model has
    the names of its ``state_dict``, without extra state. A tie is written once, and neither rows that a vocabulary was padded
    with nor buffers that are not persistent are. Files of a former export are replaced when the new ones are complete, and
    others in the folder stay.

    Args:
        source: What ``build`` returned, or a schedule that no engine was built of.
        folder: Made where there is none; the same on every rank, of which only the first needs to see it.
        max_shard_size: Bytes, or a text like ``"5GB"``; more are written as several files and an index.
        dtype: Of all floating-point tensors. None is the type the model runs in; ``torch.float32`` gives the values that an
            engine for half precision keeps in its optimizer.

    Raises:
        BuildError: on every rank: the scheduled model lacks tensors of the unmodified one or has others; a rank failed, or has
            other arguments. What was in the folder is as it was.
    """
    error, found, mesh, group = None, None, getattr(source, "mesh", None), None
    try:
        found = Source.of(source)
        mesh, group = found.mesh, found.group
        size = parsed_size(max_shard_size)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise BuildError(f"export_weights: dtype is {dtype!r}; give a floating-point type, e.g. torch.bfloat16")
        if not isinstance(folder, str | PathLike) or not isinstance(fspath(folder), str) or not fspath(folder):
            raise BuildError(f"export_weights: the folder is {folder!r}; give a path")
        said = fspath(folder), size, str(dtype)
    except Exception as err:
        error = err
    raise_on_all_ranks(error, mesh, group)
    assert found is not None
    if len(arguments := list(dict.fromkeys(gather_objects(said, mesh, group)))) > 1:
        raise BuildError(f"export_weights: the ranks were given {arguments[0]} and {arguments[1]}; give all of them the same")
    numbers = gather_objects(dist.get_rank() if dist.is_initialized() else 0, mesh, group)
    _export(found, numbers, Path(folder), dtype, size)


def _export(source: Source, numbers: list[int], path: Path, dtype: torch.dtype | None, max_shard_size: int) -> None:
    """Plan and write.

    Args:
        source: What is exported.
        numbers: Those of its ranks in the job, by place.
        path: Where to.
        dtype: The one that was asked for.
        max_shard_size: In bytes.
    """
    own: dict[str, Piece] = {}
    place = numbers.index(dist.get_rank()) if len(numbers) > 1 else 0
    ranks = Ranks(place, len(numbers), source.mesh, source.group)

    def describe() -> dict[str, Described]:
        if ranks.index == 0:
            check_folder(path)
        own.update(source.pieces())
        dtypes = source.dtypes()
        return {name: Described.of(piece, dtypes.get(name, piece.tensor.dtype)) for name, piece in own.items()}

    everyone = ranks.run_on_all(describe)
    plans: list[Plan] = []
    ranks.run_on_all(lambda: plans.append(planned(source, everyone, dtype, max_shard_size)))
    writer = _Writer(plans[0], path, ranks, numbers, own)
    try:
        writer.write()
    except Exception:
        writer.drop()
        raise


class _Writer:
    """Takes this rank's part in an export.

    Args:
        plan: What is written.
        path: Where to, on the first rank.
        ranks: All.
        numbers: Theirs in the job.
        own: This rank's pieces.
    """

    def __init__(self, plan: Plan, path: Path, ranks: Ranks, numbers: list[int], own: dict[str, Piece]) -> None:
        self._plan, self._path, self._ranks, self._numbers, self._own = plan, path, ranks, numbers, own
        self._device = _sends_from() if ranks.size > 1 else torch.device("cpu")
        self._folder: Folder | None = None
        self._parcels: list[torch.Tensor] = []
        self._made: Tensors = {}

    def write(self) -> None:
        """Write everything. Collective."""
        self._ranks.run_on_first(lambda: self._on_disk(self._begin))
        before: list[Group] = []
        for bundle in self._plan.bundles():
            self._ranks.run_on_all(lambda: self._prepare(before, bundle))  # noqa: B023  called at once
            self._exchange(bundle)
            before = bundle
        self._ranks.run_on_first(lambda: self._on_disk(lambda: self._end(before)))

    def _on_disk(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as err:
            raise BuildError(f"export_weights: {str(self._path)!r} cannot be written to: {err}") from err

    def _begin(self) -> None:
        try:
            self._folder = Folder(self._path, self._plan.files)
        except ValueError as err:
            raise BuildError(f"export_weights: {str(self._path)!r} cannot be written to: {failure_reason(err)}") from err
        if self._plan.unmodified is not None:
            try:
                self._plan.unmodified.write_config(self._folder.aside, self._plan.dtype)
            except (OSError, ValueError) as err:
                kind = self._plan.unmodified.name
                raise BuildError(f"export_weights: the config of {kind} cannot be written: {failure_reason(err)}") from err

    def _prepare(self, before: list[Group], bundle: list[Group]) -> None:
        """All that may fail: behind it the ranks send and receive."""
        if self._ranks.index == 0:
            self._on_disk(lambda: self._store(before))
            self._made = {name: torch.empty(whole.shape, dtype=whole.dtype) for name, whole in self._wholes(bundle)}
        parts = [(whole, sent) for _, whole in self._wholes(bundle) for sent in whole.parts]
        self._parcels = [self._parcel(whole, sent) for whole, sent in parts if sent.place == self._ranks.index]

    def _parcel(self, whole: Whole, sent: Sent) -> torch.Tensor:
        part = sent.chunk.of(self._own[whole.key].tensor)
        return part.to(device="cpu" if self._ranks.index == 0 else self._device, dtype=whole.dtype).contiguous()

    def _exchange(self, bundle: list[Group]) -> None:
        """Send this rank's parcels to the first rank, which puts the tensors together."""
        parcels = iter(self._parcels)
        for name, whole in self._wholes(bundle):
            for sent in whole.parts:
                if sent.place == self._ranks.index == 0:
                    sent.chunk.of_whole(self._made[name]).copy_(next(parcels))
                elif sent.place == self._ranks.index:
                    dist.send(as_bytes(next(parcels)), self._numbers[0])
                elif self._ranks.index == 0:
                    part = torch.empty(sent.chunk.sizes, dtype=whole.dtype, device=self._device)
                    dist.recv(as_bytes(part), self._numbers[sent.place])
                    sent.chunk.of_whole(self._made[name]).copy_(part)
        self._parcels = []

    def _store(self, bundle: list[Group]) -> None:
        assert self._folder is not None
        convert = self._plan.unmodified.convert if self._plan.unmodified is not None else dict
        for group in bundle:
            for name, tensor in outcome(group, self._made, convert):
                self._folder.file_of(name).write(name, tensor)
        self._made = {}

    def _end(self, last: list[Group]) -> None:
        self._store(last)
        assert self._folder is not None
        self._folder.seal(sum(torch.Size(whole.shape).numel() for whole in self._plan.wholes.values()))

    def drop(self) -> None:
        """Remove what was written aside."""
        if self._folder is not None:
            self._folder.drop()

    def _wholes(self, bundle: list[Group]) -> Iterator[tuple[str, Whole]]:
        for group in bundle:
            for name in group.sources:
                yield name, self._plan.wholes[name]


def _sends_from() -> torch.device:
    """Where tensors have to be that the job's ranks send each other."""
    backend = str(dist.get_backend_config())
    return torch.device("cpu") if "cpu:" in backend or backend == "gloo" else torch.device("cuda", torch.cuda.current_device())
