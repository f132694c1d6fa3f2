"""``export_weights``: export of trained weights, from any layout, with the names, shapes and files of the unmodified model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike, fspath
from pathlib import Path

import torch
import torch.distributed as dist

from slapo_core import BuildError, Engine, Schedule, failure_reason, gather_objects, raise_on_all_ranks
from slapo_training.distributed import Ranks
from slapo_training.model import Piece

from .export_plan.export_source import ExportSource
from .export_plan.plan import ExportPlan, make_plan, parse_size
from .export_plan.tensor_origins import PieceDescription, WholeTensor
from .huggingface.unmodified_model import ConversionGroup, Tensors, convert_group
from .safetensors_files.writer import ModelFolder, as_bytes, check_folder


@torch.no_grad()
def export_weights(
    source: Engine | Schedule,
    folder: str | PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights as the unmodified model's ``save_pretrained`` would: ``from_pretrained(folder)`` gives the same model.

    Collective over the ranks of the engine or schedule; the first rank writes. A rank that passes neither fails alone, and the
    others wait until their process group times out or its process ends. For a Transformers' model the configs are written, too,
    and names and tensors are those that its class saves. Any other model has the names of its ``state_dict``, without extra
    state. A tied parameter is written once. Padded rows of a vocabulary and non-persistent buffers are not written. Files of an
    earlier export are replaced when the new ones are complete; other files in the folder stay.

    Args:
        source: The engine that ``build`` returned, or a schedule from which no engine was built.
        folder: The folder, which is made if it does not exist; equal on every rank, but only the first needs access.
        max_shard_size: Bytes per file, or a text like ``"5GB"``; a larger model is written as several files and an index.
        dtype: Dtype of all floating-point tensors. None is the dtype the model runs in; ``torch.float32`` gives the values
            that a mixed-precision engine keeps in its optimizer.

    Raises:
        BuildError: on every rank: the scheduled model lacks tensors of the unmodified one or has others; a rank failed, or has
            other arguments. The folder has not changed.
    """
    error, found, mesh, group = None, None, getattr(source, "mesh", None), None
    try:
        found = ExportSource.of(source)
        mesh, group = found.mesh, found.group
        size = parse_size(max_shard_size)
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
    global_ranks = gather_objects(dist.get_rank() if dist.is_initialized() else 0, mesh, group)
    _export(found, global_ranks, Path(folder), dtype, size)


def _export(source: ExportSource, global_ranks: list[int], path: Path, dtype: torch.dtype | None, max_shard_size: int) -> None:
    """Plan and write an export; ``global_ranks`` are those of the participating ranks."""
    own: dict[str, Piece] = {}
    place = global_ranks.index(dist.get_rank()) if len(global_ranks) > 1 else 0
    ranks = Ranks(place, len(global_ranks), source.mesh, source.group)

    def describe() -> dict[str, PieceDescription]:
        if ranks.index == 0:
            check_folder(path)
        own.update(source.pieces())
        dtypes = source.dtypes()
        return {name: PieceDescription.of(piece, dtypes.get(name, piece.tensor.dtype)) for name, piece in own.items()}

    everyone = ranks.run_on_all(describe)
    plans: list[ExportPlan] = []
    ranks.run_on_all(lambda: plans.append(make_plan(source, everyone, dtype, max_shard_size)))
    writer = _Exporter(plans[0], path, ranks, global_ranks, own)
    try:
        writer.write()
    except Exception:
        writer.abort()
        raise


class _Exporter:
    """This rank's part in an export; only the first rank uses ``path``."""

    def __init__(self, plan: ExportPlan, path: Path, ranks: Ranks, global_ranks: list[int], own: dict[str, Piece]) -> None:
        self._plan, self._path, self._ranks, self._global_ranks, self._own = plan, path, ranks, global_ranks, own
        backend = str(dist.get_backend_config()) if ranks.size > 1 else "gloo"  # of the default group, which sends
        is_cpu = "cpu:" in backend or backend == "gloo"
        self._device = torch.device("cpu") if is_cpu else torch.device("cuda", torch.cuda.current_device())
        self._folder: ModelFolder | None = None
        self._send_buffers: list[torch.Tensor] = []
        self._made: Tensors = {}

    def write(self) -> None:
        """Write everything. Collective."""
        self._ranks.run_on_first(lambda: self._on_disk(self._begin))
        before: list[ConversionGroup] = []
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
            self._folder = ModelFolder(self._path, self._plan.files)
        except ValueError as err:
            raise BuildError(f"export_weights: {str(self._path)!r} cannot be written to: {failure_reason(err)}") from err
        if self._plan.unmodified is not None:
            try:
                self._plan.unmodified.write_config(self._folder.staging, self._plan.dtype)
            except (OSError, ValueError) as err:
                kind = self._plan.unmodified.name
                raise BuildError(f"export_weights: the config of {kind} cannot be written: {failure_reason(err)}") from err

    def _prepare(self, before: list[ConversionGroup], bundle: list[ConversionGroup]) -> None:
        """Do everything that may fail, before ranks send and receive: a failure in between would hang the others."""
        if self._ranks.index == 0:
            self._on_disk(lambda: self._store(before))
            self._made = {name: torch.empty(whole.shape, dtype=whole.dtype) for name, whole in self._whole_tensors(bundle)}
        parts = [(whole, sent) for _, whole in self._whole_tensors(bundle) for sent in whole.parts]
        device = torch.device("cpu") if self._ranks.index == 0 else self._device
        self._send_buffers = [
            sent.chunk.of(self._own[whole.key].tensor).to(device=device, dtype=whole.dtype).contiguous()
            for whole, sent in parts
            if sent.place == self._ranks.index
        ]

    def _exchange(self, bundle: list[ConversionGroup]) -> None:
        """Send this rank's buffers to the first rank, which assembles the tensors."""
        buffers = iter(self._send_buffers)
        for name, whole in self._whole_tensors(bundle):
            for sent in whole.parts:
                if sent.place == self._ranks.index == 0:
                    sent.chunk.of_whole(self._made[name]).copy_(next(buffers))
                elif sent.place == self._ranks.index:
                    dist.send(as_bytes(next(buffers)), self._global_ranks[0])
                elif self._ranks.index == 0:
                    part = torch.empty(sent.chunk.sizes, dtype=whole.dtype, device=self._device)
                    dist.recv(as_bytes(part), self._global_ranks[sent.place])
                    sent.chunk.of_whole(self._made[name]).copy_(part)
        self._send_buffers = []

    def _store(self, bundle: list[ConversionGroup]) -> None:
        assert self._folder is not None
        convert = self._plan.unmodified.convert if self._plan.unmodified is not None else dict
        for group in bundle:
            for name, tensor in convert_group(group, self._made, convert):
                self._folder.file_of(name).write(name, tensor)
        self._made = {}

    def _end(self, last: list[ConversionGroup]) -> None:
        self._store(last)
        assert self._folder is not None
        self._folder.commit(sum(torch.Size(whole.shape).numel() for whole in self._plan.wholes.values()))

    def abort(self) -> None:
        if self._folder is not None:
            self._folder.abort()

    def _whole_tensors(self, bundle: list[ConversionGroup]) -> Iterator[tuple[str, WholeTensor]]:
        for group in bundle:
            for name in group.sources:
                yield name, self._plan.wholes[name]
