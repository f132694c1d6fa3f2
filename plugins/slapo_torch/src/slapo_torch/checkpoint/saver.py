"""Saving of an engine, to be loaded exactly on the same layout and with the same losses on any other.

The folder (``slapo_training.checkpoint.folder``) has three kinds of files. Files of ``torch.distributed.checkpoint`` have
parameters, persistent buffers and per-element optimizer state by original names. ``common.pt`` has state that is stored once.
``place-0.pt``, ``place-1.pt`` and so on have each rank's own state, restored on the same layout only: random states, buffers of
a replica, and extra state of modules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from slapo_core import Program
from slapo_training.checkpoint import Buffers, CheckpointWriter, Saver, digest, rng_state
from slapo_training.distributed import Ranks
from slapo_training.ema import AverageList
from slapo_training.engines import Position, bytes_of
from slapo_training.model import Piece, named_tensors
from slapo_training.optimizers import WholeTensorOptimizer, named_optimizers

from ..step.training_progress import TrainingProgress
from . import model_state, optimizer_state

if TYPE_CHECKING:
    from slapo_training.checkpoint import TensorFiles

TARGET = "torch"
COMMON = "common.pt"
MODEL = "model."


class CheckpointState(NamedTuple):
    """Objects of an engine whose state is saved and loaded."""

    program: Program
    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    progress: TrainingProgress
    averages: AverageList


class TorchSaver(Saver):
    """Writes checkpoints of one engine, one after the other."""

    _files: TensorFiles | None = None

    def close(self) -> None:
        self._files = None
        super().close()

    def prepare_save(
        self, path: str | os.PathLike[str], state: CheckpointState, position: Position, ranks: Ranks, copies: Buffers | None
    ) -> Callable[[Ranks], None]:
        """Return a function that writes the checkpoint of the engine as it is now, given the ranks to use. Collective."""
        from slapo_training.checkpoint import TensorFiles  # noqa: PLC0415  torch.distributed.checkpoint takes half a second

        program, module = state.program, state.module
        place: dict[str, Any] = {}
        pieces: dict[str, Piece] = {}

        def collect() -> _Announcement:
            optimizers = named_optimizers(named_tensors.parameters(module), state.optimizer)
            for each in optimizers.values():
                optimizer_state.check(each)
            states = {spot: optimizer_state.collect(each) for spot, each in optimizers.items()}
            parameters, buffers = named_tensors.parameters(module), named_tensors.buffers(module)
            saved = parameters if program.axis_rank("dp") else {**parameters, **buffers}
            pieces.update({MODEL + name: model_state.piece_of_parameter(tensor, tensor) for name, tensor in saved.items()})
            for spot, own in states.items():
                pieces.update({optimizer_state.key_of(*key, spot): piece for key, piece in own.tensors.items()})
            extra = model_state.collect_extra(program.module)
            run, progress = model_state.extra_modules_run(program.module, module), state.progress.state()
            place.update(
                buffers={name: tensor.detach() for name, tensor in buffers.items()},
                ranges=ranges_by_name(module),
                optimizer={spot: own.own for spot, own in states.items()},
                progress=progress,
                extra=extra,
                run=run,
                random=rng_state.collect(),
            )
            kept = {spot: (own.own, own.once) for spot, own in states.items()}
            is_first = program.axis_rank("dp") == program.axis_rank("tp") == 0
            is_owner = isinstance(state.optimizer, WholeTensorOptimizer) and not is_first
            return _Announcement(
                {"optimizer": kept, "progress": progress, "extra": (extra, run)} if is_first else None,
                kept if is_owner else None,
                digest(_digests(place["optimizer"])),
                CheckpointWriter.propose(path, TARGET),
                position.words(),
                self._files is not None and self._files.fits(pieces),
            )

        everyone: list[_Announcement] = ranks.run_on_all(collect)
        stages = [each.stage for each in everyone if each.stage is not None]
        writing = CheckpointWriter.from_proposals([each.writing for each in everyone], TARGET)
        position.check_same(each.position for each in everyone)
        owners = [each.owner for each in everyone if each.owner is not None]
        digests = [_digests({path: own for path, (own, _) in each["optimizer"].items()}) for each in stages]
        if {each.optimizer for each in everyone}.difference(map(digest, digests)):  # otherwise one digest per rank is enough
            digests = ranks.gather(_digests(place["optimizer"]))
        files = {rank_file(ranks): bytes_of(place)}
        if ranks.index == 0:
            files[COMMON] = bytes_of(
                {
                    "optimizer": _merge_optimizer_states([own["optimizer"] for own in stages], owners, digests),
                    "progress": [own["progress"] for own in stages],
                    "extra": model_state.merge_extra([own["extra"] for own in stages]),
                    "run": {path for own in stages for path in own["extra"][1]},
                    "random": rng_state.digest_of(place["random"]),
                    "position": position._asdict(),
                }
            )
        if self._files is not None and all(each.fits for each in everyone):
            self._files.renew(pieces, ranks, copies)
        else:
            self._files = TensorFiles(pieces, ranks, copies)
        tensors = self._files
        put_averages = state.averages.prepare_save(ranks, copies is not None)
        about = {"layout": layout_of(program), **state.averages.manifest_facts()}

        def write(meeting: Ranks) -> None:
            def put() -> None:
                for name, content in files.items():
                    (writing.data / name).write_bytes(content)

            with writing.cleanup_on_error(meeting) as meeting:
                writing.begin(meeting)
                meeting.run_on_all(put)
                tensors.write(writing.data, meeting)
                put_averages(writing.data, meeting)
                writing.commit(about, meeting)

        return write


class _Announcement(NamedTuple):
    """Facts that ranks exchange before a checkpoint is written.

    Args:
        stage: Plain data of a pipeline rank, from its first replica and tensor-parallel rank; None from other ranks.
        owner: State of whole tensors that this other rank owns, or None.
        optimizer: Digest of optimizer state that must be equal on ranks with the same parameters.
        writing: See ``CheckpointWriter.proposed``.
        position: See ``Position.words``.
        fits: True if the plan of the last checkpoint fits this one.
    """

    stage: dict[str, Any] | None
    owner: dict[str, Any] | None
    optimizer: str
    writing: tuple[str, str]
    position: str
    fits: bool


def _digests(owns: Mapping[str, Any]) -> dict[str, Any]:
    """Return digests of the state that must be equal on ranks, for each of a rank's optimizers by its path."""
    return {path: optimizer_state.digests(own) for path, own in owns.items()}


def _merge_optimizer_states(
    stages: Sequence[Mapping[str, Any]], owners: Sequence[Mapping[str, Any]], digests: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the state that is stored once, for each optimizer by its path."""
    return {
        path: optimizer_state.merge(
            [each.get(path, (None, {})) for each in stages],
            [each[path] for each in owners if path in each],
            [each[path] for each in digests if path in each],
        )
        for path in dict.fromkeys(path for each in (*stages, *owners) for path in each)
    }


def ranges_by_name(module: nn.Module) -> dict[str, Any]:
    """Return full shape and ranges of this rank's pieces, by name."""
    return {name: (piece.full_shape, piece.ranges) for name, piece in model_state.pieces(module).items()}


def layout_of(program: Program) -> dict[str, int]:
    """Return the numbers of stages and ranks."""
    return {"stages": len(program.stages), **{axis: program.axis_size(axis) for axis in ("pp", "dp", "tp")}}


def rank_file(ranks: Ranks) -> str:
    """Return the name of the file of this rank's own state."""
    return f"place-{ranks.index}.pt"
