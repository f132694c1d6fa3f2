"""Checkpoints of DeepSpeed's, beside them what it does not know: the layout, and each rank's random states."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slapo_core.agreement import gather
from slapo_core.errors import BuildError
from slapo_core.program import Program
from slapo_training import checkpoint_folder, engine_checkpoint
from slapo_training.batches import fingerprint
from slapo_training.engine_checkpoint import Position
from slapo_training.meeting import on_all

from . import replicas
from .groups import whole_shape
from .options import DeepSpeedOptions

TARGET = DeepSpeedOptions.target
_WORDS = {
    "optimizer": "the optimizer",
    "groups": "the number of the optimizer's groups",
    "lr_scheduler": "the learning rate's schedule",
}


@dataclass
class Checkpoint:
    """One that this engine can load.

    Args:
        folder: Where DeepSpeed's files are.
        random: What puts this rank's random states back.
        position: Where training was.
        universal: The same for any number of replicas, where it had to be converted; removed once it is loaded.
    """

    folder: Path
    random: Any
    position: Position
    universal: Path | None = None


def save(model: Any, path: str | PathLike[str], program: Program, zero_stage: int, position: Position) -> None:
    """Write DeepSpeed's checkpoint and what belongs to it. Collective."""
    about = {**_layout(program, zero_stage), "parameters": _parameters(program), **_steps(model, program)}
    engine_checkpoint.write(path, TARGET, program, about, position, lambda folder: _fill(model, folder))


def _fill(model: Any, folder: Path) -> None:
    """DeepSpeed's files. What one rank cannot write is an error behind them, as the others wait for it inside of DeepSpeed."""
    writer, errors = model.checkpoint_engine, list[Exception]()
    if writer.is_decoupled():
        raise BuildError("DeepSpeed's decoupled checkpoint engine writes on behind a save; leave it out of DeepSpeed's config")
    write = writer.save

    def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except Exception as err:
            errors.append(err)

    writer.save = noted
    try:
        model.save_checkpoint(str(folder))
    finally:
        del writer.save
    if errors:
        raise errors[0]


def checked(model: Any, path: str | PathLike[str], program: Program, zero_stage: int) -> Checkpoint:
    """Look whether a checkpoint can be loaded, and convert it for another number of replicas. Collective; changes no engine.

    Raises:
        BuildError: on every rank: it is none, of another model, or of a layout that cannot be loaded into this one.
    """
    complete = engine_checkpoint.opened(path, TARGET, program)
    saved, own = complete.about, _steps(model, program)
    is_elsewhere = saved["dp"] != program.axis_size("dp")

    def check() -> None:
        _check(complete, program, zero_stage)
        _check_steps(saved, own)
        if is_elsewhere and zero_stage:
            replicas.check(model, zero_stage)

    on_all(check, program)
    engine_checkpoint.verify(complete, program)
    random = engine_checkpoint.read_random(complete, program)
    found = Checkpoint(complete.data, random, engine_checkpoint.read_position(complete))
    if zero_stage and is_elsewhere:
        found.universal = replicas.converted(found.folder, program, saved["dp"])
    return found


def load(model: Any, found: Checkpoint, program: Program) -> None:
    """Read it. Collective.

    Raises:
        BuildError: on every rank: DeepSpeed cannot read it to its end.
    """

    def read() -> None:
        try:
            if found.universal is not None:
                replicas.load(model, found.folder, found.universal)
            elif model.load_checkpoint(str(found.folder))[0] is None:
                raise FileNotFoundError("DeepSpeed finds no checkpoint")
            if hasattr(model.optimizer, "clip_grad"):
                model.optimizer.clip_grad = model.gradient_clipping()  # ZeRO takes that of the checkpoint
        except Exception as err:
            raise BuildError(
                f"{str(found.folder)!r} cannot be read: {type(err).__name__}: {err}; the weights of this engine may have "
                "changed, load another checkpoint before it trains"
            ) from err

    try:
        on_all(read, program)
    finally:
        if found.universal is not None and dist.get_rank() == 0:
            shutil.rmtree(found.universal.parent, ignore_errors=True)
    engine_checkpoint.put_random(found.random)


def _check(complete: checkpoint_folder.Checkpoint, program: Program, zero_stage: int) -> None:
    """Refuse another model, or a layout that cannot be loaded."""
    own, saved = _layout(program, zero_stage), complete.about
    if saved["parameters"] != _parameters(program):
        raise BuildError(
            f"{str(complete.folder)!r} is of a model with other parameters; build an engine of the model that was saved"
        )
    is_flat = program.axis_size("pp") == program.axis_size("tp") == 1
    needed = [key for key in own if key != "dp" or (own["zero"] and not is_flat)]
    if all(saved[key] == own[key] for key in needed):
        return
    words = [", ".join(f"{key}={layout[key]}" for key in own) for layout in (saved, own)]
    raise BuildError(
        f"saved with {words[0]}, but this engine has {words[1]}; load it on the same layout with the same stage of ZeRO, or at "
        "another dp where that is 0, or where there is neither a pipeline nor tensor parallelism"
    )


def _check_steps(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse states of another optimizer or schedule; an engine that only evaluates reads none."""
    if own["optimizer"] is None:
        return
    for key, word in _WORDS.items():
        if (before := saved[key]) != own[key]:
            raise BuildError(f"saved with {before!r} for {word}, but this engine has {own[key]!r}; build with the same")


def _steps(model: Any, program: Program) -> dict[str, Any]:
    """What steps the weights, the same on every rank. Collective."""
    optimizer = model.basic_optimizer
    groups = 0 if optimizer is None else len(optimizer.param_groups)
    by_stage = dict(gather((program.axis_rank("pp"), groups), program.mesh))
    return {
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "groups": groups if len(by_stage) == 1 else [by_stage[stage] for stage in sorted(by_stage)],
        "lr_scheduler": None if model.lr_scheduler is None else type(model.lr_scheduler).__name__,
    }


def _layout(program: Program, zero_stage: int) -> dict[str, int]:
    return {**engine_checkpoint.layout_of(program), "zero": zero_stage}


def _parameters(program: Program) -> int:
    """A number for the names and shapes of the model's parameters."""
    shapes = {name: tuple(whole_shape(parameter)) for name, parameter in program.module.named_parameters()}
    shapes |= {name: tuple(spec.full_shape) for name, spec in program.shard_specs.items()}
    return fingerprint(sorted(shapes.items()))
