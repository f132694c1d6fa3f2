"""Loading of the checkpoints of ``saver``."""

from __future__ import annotations

import os
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import BuildError, failure_reason
from slapo_training.checkpoint import Checkpoint, StateLoading, folder, rng_state
from slapo_training.distributed import Ranks
from slapo_training.engines import Position
from slapo_training.model import Piece, named_tensors
from slapo_training.optimizers import WholeTensorOptimizer, named_optimizers

from . import model_state, optimizer_loading, optimizer_state
from .optimizer_state import key_of
from .saver import COMMON, MODEL, TARGET, CheckpointState, layout_of, ranges_by_name, rank_file

if TYPE_CHECKING:
    from slapo_training.checkpoint import SavedTensors


def load_checkpoint(path: str | os.PathLike[str], state: CheckpointState) -> Position:
    """Load this rank's part of a checkpoint; return the position of training. Collective.

    Nothing changes before all ranks have checked that the checkpoint fits.

    Raises:
        BuildError: on every rank: no complete checkpoint, a damaged one, other parameters or another optimizer.
    """
    ranks = Ranks.of(state.program)
    groups = ranks.run_on_all(
        lambda: {
            path: optimizer_state.groups(each)
            for path, each in named_optimizers(named_tensors.parameters(state.module), state.optimizer).items()
        }
    )
    checkpoint = folder.open_checkpoint(path, TARGET, ranks)
    reading = _CheckpointLoad(state, ranks, checkpoint)
    with folder.read_context(checkpoint):
        folder.verify(checkpoint, ranks)
        ranks.run_on_all(reading.open)
        reading.check_names()
        ranks.run_on_all(lambda: reading.check(groups))
        ranks.run_on_all(reading.fetch)
        averages = state.averages.read(checkpoint, ranks)
    loading = StateLoading()
    try:
        ranks.run_on_all(lambda: reading.restore_foreign_state(loading))
    except Exception:
        loading.roll_back()
        raise
    ranks.run_on_all(reading.restore_tensors)
    state.averages.put(averages)
    return Position(**reading.common["position"])


class _CheckpointLoad:
    """One load of a checkpoint on this rank. Methods are called in their order here."""

    def __init__(self, state: CheckpointState, ranks: Ranks, checkpoint: Checkpoint) -> None:
        self._state, self._ranks, self._data = state, ranks, checkpoint.data
        self._is_same_layout = checkpoint.about["layout"] == layout_of(state.program)
        self._pieces = model_state.pieces(state.module)
        self.common: dict[str, Any] = {}
        self._place: dict[str, Any] = {}
        self._model: dict[str, torch.Tensor] = {}
        self._progress: dict[str, Any] = {}
        self._extra: dict[str, Any] = {}
        self._loaded: dict[str, optimizer_loading.LoadedState] = {}
        self._states: dict[str, dict[tuple[str, Any], Piece]] = {}
        self._saved: SavedTensors

    def open(self) -> None:
        """Read the plain data and the index of the tensors."""
        from slapo_training.checkpoint import SavedTensors  # noqa: PLC0415  torch.distributed.checkpoint takes half a second

        self.common = _read(self._data / COMMON)
        if self._is_same_layout:
            self._place = _read(self._data / rank_file(self._ranks))
        try:
            self._saved = SavedTensors(self._data)
        except (OSError, UnpicklingError, EOFError) as err:
            raise BuildError(f"'.metadata' of the checkpoint cannot be read: {failure_reason(err)}; load another one") from err

    def check_names(self) -> None:
        """Refuse a checkpoint of another model, with all differences in the message. Collective.

        Raises:
            BuildError: the same message on every rank.
        """
        facts = self._saved.facts().items()
        saved = {name.removeprefix(MODEL): fact for name, fact in facts if name.startswith(MODEL)}
        everyone = self._ranks.gather((sorted(model_state.differences(self._pieces, saved)), [*self._pieces]))
        held = {name for _, names in everyone for name in names}
        faults = list(dict.fromkeys(fault for each, _ in everyone for fault in each))
        for where, names in (("engine", saved.keys() - held), ("checkpoint", held - saved.keys())):
            if names:
                listed = ", ".join(map(repr, sorted(names)))
                faults.insert(0, f"{listed} {'is' if len(names) == 1 else 'are'} not in the {where}")
        if faults:
            raise BuildError(f"{'; '.join(faults)}; load it into the model it was saved from")

    def check(self, groups: list[dict[str, list[dict[str, Any]]]]) -> None:
        """Select the state that this rank loads, given the parameter groups of the optimizers of all ranks.

        Raises:
            BuildError: the state does not fit.
        """
        program, module, optimizer, progress, _ = self._state
        kept, now = self._place.get("ranges", {}), ranges_by_name(module)
        optimizers = named_optimizers(named_tensors.parameters(module), optimizer)
        place = self._place.get("optimizer") or {}
        for path, each in optimizers.items():
            own, saved = place.get(path), self.common["optimizer"].get(path)
            parts = {} if own is None else own["parts"]
            here = {name: part for name, part in parts.items() if name in now and kept[name] == now[name]}
            everyone = [ranks.get(path, []) for ranks in groups]
            own = own if kept == now else None
            self._loaded[path] = optimizer_loading.select_state(
                each, everyone, saved, own, here, progress.depends_on_group_order
            )
        stages = self.common["progress"]
        source = self._loaded[""].source if self._loaded else None
        first = [] if source is None else [stages[source]]
        self._progress = progress.state_for_rank([*([self._place["progress"]] if kept == now else first), *stages])
        progress.check_same(self._progress)
        self._extra = self.common["extra"]
        if self._is_same_layout:
            foreign = (model_state.extra_modules_run(program.module, module) & self.common["run"]) - self._place["run"]
            self._extra = model_state.extra_for_rank(self._place["extra"], foreign, self._extra)
        model_state.check_same_extra(program.module, self._extra)
        if self._is_same_layout:
            rng_state.check(self._place["random"])
        shapes = self._saved.facts()
        self._states = {
            path: optimizer_loading.tensors_to_read(each, self._loaded[path], shapes, path) for path, each in optimizers.items()
        }

    def fetch(self) -> None:
        """Read the saved tensors into new tensors."""
        empty = {name: torch.empty_like(piece.tensor, device="cpu") for name, piece in self._pieces.items()}
        fresh = {MODEL + name: piece._replace(tensor=empty[name]) for name, piece in self._pieces.items()}
        states = {key_of(*key, path): piece for path, own in self._states.items() for key, piece in own.items()}
        self._saved.read({**fresh, **states})
        kept, now = self._place.get("ranges", {}), ranges_by_name(self._state.module)
        own = {name: each for name, each in self._place.get("buffers", {}).items() if kept[name] == now.get(name)}
        self._model = {name: own.get(name, each) for name, each in empty.items()}

    def restore_foreign_state(self, loading: StateLoading) -> None:
        """Call ``load_state_dict`` and the like of foreign code, which may raise; tensors have not changed yet."""
        program, module, optimizer, progress, _ = self._state
        model_state.restore_extra(program.module, self._extra, loading)
        for path, each in named_optimizers(named_tensors.parameters(module), optimizer).items():
            optimizer_loading.restore(each, self._loaded[path], self._states[path], loading)
        if isinstance(optimizer, WholeTensorOptimizer):
            optimizer.take_options()
        progress.restore(self._progress, loading)

    def restore_tensors(self) -> None:
        """Write the tensors into the model, and restore the random generators."""
        module = self._state.module
        model_state.restore({**named_tensors.parameters(module), **named_tensors.buffers(module)}, self._model)
        if self._is_same_layout:
            rng_state.restore(self._place["random"])
        else:
            rng_state.reseed(self.common["random"])


def _read(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as err:
        raise BuildError(
            f"{os.fspath(file)!r} of the checkpoint is missing or broken: {failure_reason(err)}; load another one"
        ) from err
