"""The directory of an engine's checkpoint: the engine's own files, what they are of, and each rank's random states."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slapo_core import BuildError, Program

from ..checkpoint import rng_state
from ..checkpoint.folder import Checkpoint, CheckpointWriter
from ..checkpoint.plain_data import Position
from ..distributed.ranks import Ranks
from ..ema.weight_average import AverageList
from ..model.named_tensors import copy_into

_POSITION = "position.pt"


def prepare_save(
    path: str | PathLike[str],
    target: str,
    program: Program,
    about: Mapping[str, Any],
    position: Position,
    collect: Callable[[Path, Ranks], Callable[[Ranks], None]],
    ranks: Ranks,
    buffers: Mapping[str, torch.Tensor],
    averages: AverageList,
    is_copied: bool,
) -> Callable[[Ranks], None]:
    """Return a function that writes a checkpoint; it takes the ranks to synchronize with. Both are collective.

    Args:
        path: The same directory on every rank; created if missing.
        about: Description of the engine for the checkpoint, the same on every rank.
        collect: Takes the directory of the engine's own files and the ranks to synchronize with, and returns a function that
            writes the files and takes the ranks to synchronize with then. Both are collective and raise on all ranks.
        buffers: This rank's buffers, whose values may differ between replicas.
        is_copied: True if training goes on while the files are written.

    Raises:
        BuildError: on every rank: one rank failed, the ranks have different directories, or the directory has another
            target's checkpoint. An existing checkpoint is unchanged. The returned function raises it, too.
    """
    said = ranks.run_on_all(lambda: (CheckpointWriter.propose(path, target), position.words()))
    writing = CheckpointWriter.from_proposals([proposed for proposed, _ in said], target)
    position.check_same(words for _, words in said)
    about = {**about, "layout_of_ranks": layout_of(program), **averages.manifest_facts()}
    files: dict[str, bytes] = {}

    def gather() -> None:
        own = {name: tensor.detach() for name, tensor in buffers.items()}
        files[_own_file(ranks.index)] = bytes_of({**rng_state.collect(), "buffers": own})
        if ranks.index == 0:
            files[_POSITION] = bytes_of(position._asdict())

    def put() -> None:
        for name, content in files.items():
            (writing.data / name).write_bytes(content)

    def write(meeting: Ranks) -> None:
        with writing.cleanup_on_error(meeting) as meeting:
            fill(meeting)
            put_averages(writing.data, meeting)
            meeting.run_on_all(put)
            writing.commit(about, meeting)

    with writing.cleanup_on_error(ranks) as ranks:
        writing.begin(ranks)
        fill = collect(writing.data, ranks)
        ranks.run_on_all(gather)
        put_averages = averages.prepare_save(ranks, is_copied)
    return write


def bytes_of(value: Any) -> bytes:
    """Return what ``torch.save`` writes of a value as it is now."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class EngineExtras(NamedTuple):
    """Files beside an engine's own.

    Args:
        own: The random states and buffers of this rank, or on another layout a number to derive random states from.
    """

    position: Position
    own: Any

    def put(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Put back random states, and this rank's buffers where they were saved on this layout."""
        if isinstance(self.own, int):
            rng_state.reseed(self.own)
            return
        rng_state.restore(self.own)
        for name, saved in self.own["buffers"].items():
            copy_into(buffers[name], saved)


def read_extras(checkpoint: Checkpoint, program: Program, buffers: Mapping[str, torch.Tensor]) -> EngineExtras:
    """Read the files that ``prepare_save`` writes beside an engine's own; no buffer is changed. Collective.

    Raises:
        BuildError: the state cannot be restored in this process, or into these buffers.
    """
    ranks = Ranks.of(program)
    is_same = checkpoint.about["layout_of_ranks"] == layout_of(program)
    found: list[EngineExtras] = []

    def read() -> None:
        position = Position(**torch.load(checkpoint.data / _POSITION, weights_only=True))
        saved = torch.load(checkpoint.data / _own_file(ranks.index if is_same else 0), map_location="cpu", weights_only=True)
        if is_same:
            rng_state.check(saved)
            for name, tensor in saved["buffers"].items():
                if name not in buffers or buffers[name].shape != tensor.shape:
                    raise BuildError(
                        f"the checkpoint has the buffer {name!r} of shape {tuple(tensor.shape)}, which the model has not; load "
                        "it into the model it was saved from"
                    )
        found.append(EngineExtras(position, saved if is_same else rng_state.digest_of(saved)))

    ranks.run_on_all(read)
    return found[0]


_WORDS = {
    "precision": "precision",
    "optimizer": "the optimizer",
    "groups": "the number of the optimizer's groups",
    "lr_scheduler": "the learning rate's schedule",
}


def check_same(saved: Mapping[str, Any], own: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise ``BuildError`` for a checkpoint of another kind of training, by the facts of these keys, in this order."""
    for key in keys:
        if saved[key] != own[key]:
            raise BuildError(
                f"saved with {saved[key]!r} for {_WORDS[key]}, but this engine has {own[key]!r}; build with the same"
            )


def check_shapes(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ``BuildError`` for a checkpoint of tensors with other names or shapes than the model's."""
    for name in sorted(saved.keys() ^ own.keys()):
        where = "the checkpoint, not the model" if name in saved else "the model, not the checkpoint"
        raise BuildError(f"{name!r} is in {where}; load it into the same model")
    for name, shape in own.items():
        if saved[name] != shape:
            raise BuildError(f"{name!r} was saved with the shape {saved[name]}, and has {shape}; load it into the same model")


def layout_of(program: Program) -> dict[str, int]:
    return {axis: program.axis_size(axis) for axis in ("pp", "dp", "tp")}


def _own_file(place: int) -> str:
    return f"random-{place}.pt"
