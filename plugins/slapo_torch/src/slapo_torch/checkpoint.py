"""Save an engine, to be loaded exactly on the same layout, and on any other so that the losses go on.

In the folder of ``slapo_training.checkpoint_folder``: the files of ``torch.distributed.checkpoint`` have parameters, persistent
buffers and what the optimizer keeps for each element of a parameter, all by original names; ``common.pt`` what there is once;
``place-0.pt`` and so on, by ranks, what is each rank's own and comes back on the same layout alone: random states, a replica's
buffers, modules' extra state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from slapo_core.program import Program
from slapo_training import model_tensors, random_state
from slapo_training.checkpoint_folder import Writing
from slapo_training.engine_checkpoint import Position, bytes_of
from slapo_training.pieces import Piece
from slapo_training.plain import digest
from slapo_training.ranks import Ranks
from slapo_training.saving import Buffers, Saver, Saving
from slapo_training.whole_steps.optimizer import WholeTensorOptimizer
from slapo_training.whole_steps.stepped import stepped_by

from . import extra_state, model_state, optimizer_state
from .updates import Progress

if TYPE_CHECKING:
    from slapo_training.tensor_files import TensorFiles

TARGET = "torch"
COMMON = "common.pt"
MODEL = "model."


class Trained(NamedTuple):
    """What of an engine is saved and loaded.

    Args:
        program: The program.
        module: This rank's stages.
        optimizer: This rank's, or None.
        progress: Of what changes the weights.
    """

    program: Program
    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    progress: Progress


class TorchSaver(Saver):
    """Writes checkpoints of one engine, one after the other."""

    _files: TensorFiles | None = None

    def save(self, path: str | os.PathLike[str], what: Trained, position: Position, waits: bool) -> Saving:
        """Write a checkpoint. Collective; see ``Saver.write``.

        Args:
            path: The same folder on every rank.
            what: What is saved.
            position: Where training is.
            waits: Whether to return when it is written, not when all that is to be written was copied.
        """
        return self.write(lambda ranks, copies: self._prepared(path, what, position, ranks, copies), waits)

    def close(self) -> None:
        """Wait, and give back what only a checkpoint in the background needs."""
        self._files = None
        super().close()

    def _prepared(
        self, path: str | os.PathLike[str], what: Trained, position: Position, ranks: Ranks, copies: Buffers | None
    ) -> Callable[[Ranks], None]:
        """What writes the checkpoint as the engine is now, given the ranks to meet. Collective."""
        from slapo_training.tensor_files import TensorFiles  # noqa: PLC0415  torch.distributed.checkpoint takes half a second

        program, module = what.program, what.module
        place: dict[str, Any] = {}
        pieces: dict[str, Piece] = {}

        def collect() -> tuple[Any, Any, str, tuple[str, str], str, bool]:
            steppers = stepped_by(model_tensors.parameters(module), what.optimizer)
            for each in steppers.values():
                optimizer_state.check(each)
            states = {spot: optimizer_state.held(each) for spot, each in steppers.items()}
            parameters, buffers = model_tensors.parameters(module), model_tensors.buffers(module)
            saved = parameters if program.axis_rank("dp") else {**parameters, **buffers}
            pieces.update({MODEL + name: model_state.piece(tensor, tensor) for name, tensor in saved.items()})
            for spot, state in states.items():
                pieces.update({optimizer_state.key_of(*key, spot): piece for key, piece in state.tensors.items()})
            extra = extra_state.packed(program.module)
            run, progress = extra_state.run(program.module, module), what.progress.packed()
            place.update(
                buffers={name: tensor.detach() for name, tensor in buffers.items()},
                ranges=ranges_of(module),
                optimizer={spot: state.own for spot, state in states.items()},
                progress=progress,
                extra=extra,
                run=run,
                random=random_state.packed(),
            )
            kept = {spot: (state.own, state.once) for spot, state in states.items()}
            once = {"optimizer": kept, "progress": progress, "extra": (extra, run)}
            owns = isinstance(what.optimizer, WholeTensorOptimizer)
            is_first = program.axis_rank("dp") == program.axis_rank("tp") == 0
            fits = self._files is not None and self._files.fits(pieces)
            words = digest(_told(place["optimizer"]))
            beside = kept if owns and not is_first else None
            return once if is_first else None, beside, words, Writing.proposed(path, TARGET), position.words(), fits

        everyone = ranks.on_all(collect)
        stages = [own for own, *_ in everyone if own is not None]
        writing = Writing.agreed([proposed for _, _, _, proposed, *_ in everyone], TARGET)
        position.check_same(words for *_, words, _ in everyone)
        owners = [own for _, own, *_ in everyone if own is not None]
        told = [_told({path: own for path, (own, _) in each["optimizer"].items()}) for each in stages]
        if {words for _, _, words, *_ in everyone}.difference(
            map(digest, told)
        ):  # what is long travels where ranks differ alone
            told = ranks.gather(_told(place["optimizer"]))
        files = {place_of(ranks): bytes_of(place)}
        if ranks.place == 0:
            files[COMMON] = bytes_of(
                {
                    "optimizer": _merged([own["optimizer"] for own in stages], owners, told),
                    "progress": [own["progress"] for own in stages],
                    "extra": extra_state.merged([own["extra"] for own in stages]),
                    "run": {path for own in stages for path in own["extra"][1]},
                    "random": random_state.digest_of(place["random"]),
                    "position": position._asdict(),
                }
            )
        if self._files is not None and all(fits for *_, fits in everyone):
            self._files.renew(pieces, ranks, copies)
        else:
            self._files = TensorFiles(pieces, ranks, copies)
        tensors = self._files
        about = {"layout": layout_of(program)}

        def write(meeting: Ranks) -> None:
            def put() -> None:
                for name, content in files.items():
                    (writing.data / name).write_bytes(content)

            with writing.by(meeting) as meeting:
                writing.begin(meeting)
                meeting.on_all(put)
                tensors.write(writing.data, meeting)
                writing.seal(about, meeting)

        return write


def _told(owns: Mapping[str, Any]) -> dict[str, Any]:
    """Of each of a rank's optimizers in few words what ranks should have alike."""
    return {path: optimizer_state.told(own) for path, own in owns.items()}


def _merged(
    stages: Sequence[Mapping[str, Any]], owners: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What is kept once of each of the optimizers, by its place in the rank's."""
    return {
        path: optimizer_state.merged(
            [each.get(path, (None, {})) for each in stages],
            [each[path] for each in owners if path in each],
            [each[path] for each in told if path in each],
        )
        for path in dict.fromkeys(path for each in (*stages, *owners) for path in each)
    }


def ranges_of(module: nn.Module) -> dict[str, Any]:
    """Where what this rank has lies."""
    return {name: (piece.full_shape, piece.ranges) for name, piece in model_state.pieces(module).items()}


def layout_of(program: Program) -> dict[str, int]:
    """How many stages and ranks there are."""
    return {"stages": len(program.stages), **{axis: program.axis_size(axis) for axis in ("pp", "dp", "tp")}}


def place_of(ranks: Ranks) -> str:
    """The file of what is this rank's own."""
    return f"place-{ranks.place}.pt"
