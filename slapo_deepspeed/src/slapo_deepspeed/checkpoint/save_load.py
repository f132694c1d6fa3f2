"""Checkpoints in DeepSpeed's format, with files for the layout and each rank's random states beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from slapo_core import BuildError, Program, gather_objects
from slapo_training.batches import fingerprint
from slapo_training.checkpoint import Buffers
from slapo_training.checkpoint import folder as checkpoint_folder
from slapo_training.distributed import Ranks, run_on_all_ranks
from slapo_training.ema import Averages
from slapo_training.engines import EngineExtras, Position, checkpoint_files
from slapo_training.external_engine import ExternalEngine
from slapo_training.model import buffers, make_dense, parameters
from slapo_training.optimizers import whole_tensor_checkpoint

from ..configuration.options import DeepSpeedOptions
from ..optimizer.local_tensors import Shares, unsupported_reason
from ..process_state._deepspeed_private import full_shape, inner_optimizer, reset_clipping
from .resharding import SAME_LAYOUT, CheckpointReader, ReshardedState
from .tensor_index import Files, TensorIndex, name_of


@dataclass
class Checkpoint:
    """Checkpoint that this engine can load.

    ``taken`` is read from a checkpoint of another layout, None if DeepSpeed reads the checkpoint itself; ``states`` are those
    of a whole-tensor optimizer, by rank.
    """

    folder: Path
    beside: EngineExtras
    taken: ReshardedState | None = None
    states: list[dict[str, Any]] = field(default_factory=list)
    averages: Averages = field(default_factory=list)


class DeepSpeedCheckpoints(ExternalEngine):
    """Part of DeepSpeed's engine that saves and loads checkpoints.

    Attributes:
        model: DeepSpeed's engine.
    """

    options: DeepSpeedOptions
    model: Any

    def _shares(self) -> Shares:
        return Shares(self.model, self.module, self.program)

    def _prepare_save(
        self, path: str | PathLike[str], position: Position, ranks: Ranks, copies: Buffers | None
    ) -> Callable[[Ranks], None]:
        """Return a function that writes DeepSpeed's checkpoint and the files beside it. Collective.

        The function takes the ranks to synchronize with. With ``copies``, buffers for this rank's tensors, it writes the values
        of this moment; without, DeepSpeed writes its files at once.

        Raises:
            BuildError: on every rank: the checkpoint cannot be written.
        """
        model, module, program = self.model, self.module, self.program
        if model.optimizer is not None and inner_optimizer(model) is None:
            raise BuildError("DeepSpeed does not save an engine that only evaluates in bf16 or fp16; save the one that trains")
        about = {**self._layout(), "parameters": _parameters(program), **_steps(model, program)}
        places: list[TensorIndex] = []
        ranks.run_on_all(lambda: places.append(TensorIndex(model, module, program)))

        def collect(folder: Path, ranks: Ranks) -> Callable[[Ranks], None]:
            files, beside = Files(folder, places[0], copies), dict[str, bytes]()

            def gather() -> None:
                files.take(model)
                beside.update(places[0].files(ranks.index))
                if (states := whole_tensor_checkpoint.pack_state(inner_optimizer(model), parameters(module))) is not None:
                    beside[whole_tensor_checkpoint.file_of(ranks.index)] = states

            def put() -> None:
                files.write()
                for name, content in beside.items():
                    (folder / name).write_bytes(content)

            def write(meeting: Ranks) -> None:
                meeting.run_on_all(put)

            ranks.run_on_all(gather)
            return write

        given = path, self.options.target, program, about, position, collect, ranks, buffers(module)
        return checkpoint_files.prepare_save(*given, self.averages, copies is not None)

    def _load(self, path: str | PathLike[str]) -> Position:
        """Load a checkpoint; return the position of training. Collective.

        Raises:
            BuildError: on every rank: ``_prepare_load`` refuses the checkpoint, or reading failed and the weights may have
                changed.
        """
        found = self._prepare_load(path)
        model, module = self.model, self.module

        def read() -> None:
            try:
                if found.taken is not None:
                    found.taken.put()
                elif model.load_checkpoint(str(found.folder))[0] is None:
                    raise FileNotFoundError("DeepSpeed finds no checkpoint")
                if found.states:
                    whole_tensor_checkpoint.put(inner_optimizer(model), parameters(module), found.states)
                reset_clipping(model)
            except Exception as err:
                raise BuildError(
                    f"{str(found.folder)!r} cannot be read: {type(err).__name__}: {err}; the weights of this engine may have "
                    "changed, load another checkpoint before it trains"
                ) from err

        with self._load_context():
            run_on_all_ranks(read, self.program)
            found.beside.put(buffers(module))
        self.averages.put(found.averages)
        return found.beside.position

    def _prepare_load(self, path: str | PathLike[str]) -> Checkpoint:
        """Check that a checkpoint can be loaded, and read it if it is of another layout. Collective; the engine is unchanged.

        Raises:
            BuildError: on every rank: there is no checkpoint, or it is damaged, of another model, or of a layout that this
                engine cannot load.
        """
        model, program, held = self.model, self.program, buffers(self.module)
        ranks = Ranks.of(program)
        complete = checkpoint_folder.open_checkpoint(path, self.options.target, ranks)
        for buffer in held.values():
            make_dense(buffer)
        saved, own = complete.about, _steps(model, program)

        def check() -> None:
            if saved["parameters"] != _parameters(program):
                raise BuildError(
                    f"{str(complete.folder)!r} is of a model with other parameters; build an engine of the model that was saved"
                )
            _check_steps(saved, own)
            whole_tensor_checkpoint.check_kind(saved["whole"], inner_optimizer(model))

        ranks.run_on_all(check)
        with checkpoint_folder.read_context(complete):
            checkpoint_folder.verify(complete, ranks)
            found = Checkpoint(complete.data, checkpoint_files.read_extras(complete, program, held))
            found.averages = self.averages.read(complete, ranks)
            if not self._has_layout_of(complete):
                found.taken = self._read_resharded(complete)
            if saved["whole"] and inner_optimizer(model) is not None:
                number = saved["pp"] * saved["dp"] * saved["tp"]
                ranks.run_on_all(lambda: found.states.extend(whole_tensor_checkpoint.read(complete.data, number)))
        return found

    def _layout(self) -> dict[str, int]:
        return {**checkpoint_files.layout_of(self.program), "zero": self.options.zero_stage}

    def _has_layout_of(self, complete: checkpoint_folder.Checkpoint) -> bool:
        """Return True if each rank holds the same elements in the same order, so that DeepSpeed reads them. Collective."""
        own, saved, program = self._layout(), complete.about, self.program
        zero = own["zero"]
        if any(saved[key] != own[key] for key in own if key != "dp" or zero):
            return False
        replica = program.axis_rank("dp") if zero else 0
        place = (program.axis_rank("pp") * saved["dp"] + replica) * saved["tp"] + program.axis_rank("tp")

        def look() -> bool:
            about = torch.load(complete.data / name_of(place), weights_only=True)
            return bool(about["why_not"] or unsupported_reason(self.model, self.module)) or self._shares().has_layout(about)

        return all(Ranks.of(program).run_on_all(look))

    def _read_resharded(self, complete: checkpoint_folder.Checkpoint) -> ReshardedState:
        """Read this rank's data from a checkpoint of another layout. Collective."""
        saved, shares = complete.about, list[Shares]()

        def check() -> None:
            if reason := unsupported_reason(self.model, self.module):
                raise BuildError(f"an engine of {reason} takes its own layout alone; {SAME_LAYOUT}")
            shares.append(self._shares())

        def read() -> None:
            try:
                parts = CheckpointReader(complete.data, saved["pp"] * saved["dp"] * saved["tp"])
                taken.read(parts)
            except BuildError:
                raise
            except Exception as err:  # torch raises many types for broken files
                raise BuildError(
                    f"{str(complete.folder)!r} cannot be read: {type(err).__name__}: {err}; nothing has changed, load another "
                    "one"
                ) from err

        run_on_all_ranks(check, self.program)
        taken = ReshardedState(self.model, shares[0], self.program)
        run_on_all_ranks(read, self.program)
        return taken


def _check_steps(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse states of another optimizer or schedule; an engine that only evaluates reads none."""
    if own["optimizer"] is None:
        return
    # stages with different groups are compared by parameter names
    by_stage = list in (type(saved["groups"]), type(own["groups"]))
    checkpoint_files.check_same(saved, own, ("optimizer", *(() if by_stage else ("groups",)), "lr_scheduler"))


def _steps(model: Any, program: Program) -> dict[str, Any]:
    """Return facts of the optimizer and the learning-rate schedule, the same on every rank. Collective."""
    optimizer = inner_optimizer(model)
    groups = 0 if optimizer is None else len(optimizer.param_groups)
    by_stage = dict(gather_objects((program.axis_rank("pp"), groups), program.mesh))
    return {
        **whole_tensor_checkpoint.facts_of(optimizer, model.lr_scheduler),
        "groups": groups if len(by_stage) == 1 else [by_stage[stage] for stage in sorted(by_stage)],
    }


def _parameters(program: Program) -> int:
    """Return a fingerprint of the names and shapes of the model's parameters."""
    shapes = {name: tuple(full_shape(parameter)) for name, parameter in program.module.named_parameters()}
    shapes |= {name: tuple(spec.full_shape) for name, spec in program.shard_specs.items()}
    return fingerprint(sorted(shapes.items()))
