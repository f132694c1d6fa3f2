"""Save and load an engine: exactly on the same layout, and on any other so that the losses go on.

In the folder of ``slapo_training.checkpoint_folder``: the files of ``torch.distributed.checkpoint`` have parameters, persistent
buffers and what the optimizer keeps for each element of a parameter, all by original names; ``common.pt`` what there is once;
``place-0.pt`` and so on, by ranks, what is each rank's own and comes back on the same layout alone: random states, a replica's
buffers, modules' extra state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from slapo_core.causes import reason
from slapo_core.errors import BuildError
from slapo_core.program import Program
from slapo_training import checkpoint_folder, model_tensors, random_state
from slapo_training.checkpoint_folder import Writing
from slapo_training.engine_checkpoint import Position, bytes_of
from slapo_training.pieces import Piece
from slapo_training.ranks import Ranks
from slapo_training.saving import Buffers, Saver, Saving

from . import extra_state, model_state, optimizer_state
from .updates import Progress

if TYPE_CHECKING:
    from slapo_training.tensor_files import TensorFiles

_TARGET = "torch"
_COMMON = "common.pt"
_MODEL = "model."


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

        def collect() -> tuple[Any, tuple[str, str], str, bool]:
            optimizer_state.check(module, what.optimizer)
            state = optimizer_state.held(module, what.optimizer)
            parameters, buffers = model_tensors.parameters(module), model_tensors.buffers(module)
            kept = parameters if program.axis_rank("dp") else {**parameters, **buffers}
            pieces.update({_MODEL + name: model_state.piece(tensor, tensor) for name, tensor in kept.items()})
            pieces.update({optimizer_state.key_of(*key): piece for key, piece in state.tensors.items()})
            extra = extra_state.packed(program.module)
            run, progress = extra_state.run(program.module, module), what.progress.packed()
            place.update(
                buffers={name: tensor.detach() for name, tensor in buffers.items()},
                ranges=_ranges(module),
                optimizer=state.parts,
                progress=progress,
                extra=extra,
                run=run,
                random=random_state.packed(),
            )
            once = {"optimizer": state.once, "progress": progress, "extra": (extra, run)}
            is_first = program.axis_rank("dp") == program.axis_rank("tp") == 0
            fits = self._files is not None and self._files.fits(pieces)
            return once if is_first else None, Writing.proposed(path, _TARGET), position.words(), fits

        everyone = ranks.on_all(collect)
        stages = [own for own, *_ in everyone if own is not None]
        writing = Writing.agreed([proposed for _, proposed, *_ in everyone], _TARGET)
        position.check_same(words for _, _, words, _ in everyone)
        files = {f"place-{ranks.place}.pt": bytes_of(place)}
        if ranks.place == 0:
            files[_COMMON] = bytes_of(
                {
                    "optimizer": optimizer_state.merged([own["optimizer"] for own in stages]),
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
        about = {"layout": _layout(program)}

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


def load_checkpoint(path: str | os.PathLike[str], what: Trained) -> Position:
    """Read this rank's part; nothing is changed before all ranks have found theirs to fit. Collective.

    Returns:
        Where training was.

    Raises:
        BuildError: on every rank: no complete checkpoint, a damaged one, other parameters or another optimizer.
    """
    from slapo_training.tensor_files import SavedTensors  # noqa: PLC0415  torch.distributed.checkpoint takes half a second

    program, module, optimizer, progress = what
    ranks = Ranks.of(program)
    tensors: dict[str, torch.Tensor] = {}
    pieces: dict[str, Piece] = {}

    def look() -> list[dict[str, Any]]:
        tensors.update({**model_tensors.parameters(module), **model_tensors.buffers(module)})
        pieces.update(model_state.pieces(module))
        return optimizer_state.groups(module, optimizer)

    groups = ranks.on_all(look)
    checkpoint = checkpoint_folder.opened(path, _TARGET, ranks)
    _, data, about = checkpoint
    is_same = about["layout"] == _layout(program)
    found: dict[str, Any] = {}
    place: dict[str, Any] = {}

    def read() -> None:
        found.update(_read(data / _COMMON))
        if is_same:
            place.update(_read(data / f"place-{ranks.place}.pt"))
        try:
            found["tensors"] = SavedTensors(data)
        except (OSError, UnpicklingError, EOFError) as err:
            raise BuildError(f"'.metadata' of the checkpoint cannot be read: {reason(err)}; load another one") from err

    wanted: dict[tuple[str, str], Piece] = {}

    def check(facts: Mapping[str, Any]) -> None:
        optimizer_state.check_same(optimizer, groups, found["optimizer"])
        kept = place.get("ranges", {})
        same = {name for name, ranges in _ranges(module).items() if kept.get(name) == ranges}
        found["buffers"] = {name: tensor for name, tensor in place.get("buffers", {}).items() if name in same}
        found["parts"] = {n: each for n, each in place.get("optimizer", {}).items() if n in same or n not in kept}
        optimizer_state.check_parts(module, optimizer, found["optimizer"], found["parts"])
        found["progress"] = progress.chosen([*([place["progress"]] if is_same else []), *found["progress"]])
        progress.check_same(found["progress"])
        if is_same:
            foreign = (extra_state.run(program.module, module) & found["run"]) - place["run"]
            found["extra"] = extra_state.chosen(place["extra"], foreign, found["extra"])
        extra_state.check_same(program.module, found["extra"])
        if is_same:
            random_state.check(place["random"])
        wanted.update(optimizer_state.wanted(module, optimizer, found["optimizer"], facts))

    def fetch() -> None:
        fresh = {name: piece._replace(tensor=torch.empty_like(piece.tensor, device="cpu")) for name, piece in pieces.items()}
        named = {_MODEL + name: piece for name, piece in fresh.items()}
        found["tensors"].read({**named, **{optimizer_state.key_of(*key): piece for key, piece in wanted.items()}})
        found["model"] = {name: found["buffers"].get(name, piece.tensor) for name, piece in fresh.items()}

    def put_foreign() -> None:  # others' code, which may raise, while the tensors are as they were
        extra_state.put(program.module, found["extra"])
        optimizer_state.put(module, optimizer, found["optimizer"], wanted, found["parts"])
        progress.put(found["progress"])

    def put() -> None:
        model_state.put(tensors, found["model"])
        if is_same:
            random_state.put(place["random"])
        else:
            random_state.derive(found["random"])

    with checkpoint_folder.reading(checkpoint):
        checkpoint_folder.verify(checkpoint, ranks)
        ranks.on_all(read)
        facts = found["tensors"].facts()
        _check_names(pieces, facts, ranks)
        ranks.on_all(lambda: check(facts))
        ranks.on_all(fetch)
    ranks.on_all(put_foreign)
    ranks.on_all(put)
    return Position(**found["position"])


def _check_names(pieces: Mapping[str, Piece], facts: Mapping[str, Any], ranks: Ranks) -> None:
    """Refuse another model, by all that is different.

    Raises:
        BuildError: the same on every rank.
    """
    saved = {name.removeprefix(_MODEL): fact for name, fact in facts.items() if name.startswith(_MODEL)}
    everyone = ranks.gather((sorted(model_state.differences(pieces, saved)), [*pieces]))
    held = {name for _, names in everyone for name in names}
    faults = list(dict.fromkeys(fault for each, _ in everyone for fault in each))
    for where, names in (("engine", saved.keys() - held), ("checkpoint", held - saved.keys())):
        if names:
            listed = ", ".join(map(repr, sorted(names)))
            faults.insert(0, f"{listed} {'is' if len(names) == 1 else 'are'} not in the {where}")
    if faults:
        raise BuildError(f"{'; '.join(faults)}; load it into the model it was saved from")


def _ranges(module: nn.Module) -> dict[str, Any]:
    """Where what this rank has lies."""
    return {name: (piece.full_shape, piece.ranges) for name, piece in model_state.pieces(module).items()}


def _layout(program: Program) -> dict[str, int]:
    return {"stages": len(program.stages), **{axis: program.axis_size(axis) for axis in ("pp", "dp", "tp")}}


def _read(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as err:
        raise BuildError(
            f"{os.fspath(file)!r} of the checkpoint is missing or broken: {reason(err)}; load another one"
        ) from err
