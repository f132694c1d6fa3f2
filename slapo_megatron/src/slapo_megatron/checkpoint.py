"""Checkpoints of Megatron's, beside them what it does not know: of what they are, and each rank's random states."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slapo_core.errors import BuildError
from slapo_training import random_state
from slapo_training.meeting import on_all

from .optimizers import prepared
from .repairs import repaired
from .sharded_state import Held

if TYPE_CHECKING:
    from .engine import MegatronEngine

_ABOUT = "slapo.json"
_RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}


def save(engine: MegatronEngine, path: str | PathLike[str]) -> None:
    """Write Megatron's checkpoint and what belongs to it. Collective; a directory without ``slapo.json`` is not complete."""
    from megatron.core import dist_checkpointing

    folder, program = Path(path), engine.program
    held = Held(program)

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            (folder / _ABOUT).unlink(missing_ok=True)

    def write() -> None:
        with repaired():
            dist_checkpointing.save(_state(engine, held, _has_stepped(engine), is_loading=False), str(folder))
        torch.save(random_state.packed(), _random_file(folder))

    def finish() -> None:
        if dist.get_rank() == 0:
            (folder / _ABOUT).write_text(json.dumps(_about(engine, held)))

    for action in (begin, write, finish):
        on_all(action, program)


def load(engine: MegatronEngine, path: str | PathLike[str], reading: Callable[[], AbstractContextManager[None]]) -> None:
    """Read it. Collective.

    Args:
        engine: What it is read into.
        path: The directory.
        reading: Around what changes the engine.

    Raises:
        BuildError: on every rank: it is none, or of something else than this engine trains; the engine is as before then.
    """
    from megatron.core import dist_checkpointing

    folder, program = Path(path), engine.program
    held, found = Held(program), dict[str, Any]()

    def check() -> None:
        found.update(_checked(folder, _about(engine, held)))
        if found["layout"] == _layout(engine):
            found["random"] = torch.load(_random_file(folder), weights_only=True)
            random_state.check(found["random"])

    def read_weights() -> None:
        fresh = {key: torch.empty_like(tensor) for key, tensor in held.tensors.items()}
        with repaired():
            found["weights"] = dist_checkpointing.load({"model": held.sharded(fresh)}, str(folder))["model"]

    def read_rest() -> None:
        if engine.optimizer is not None and not found["has_stepped"]:
            engine.optimizer.optimizer.state.clear()
        with torch.no_grad():
            for key, tensor in held.tensors.items():
                tensor.copy_(found["weights"][key])
        with repaired():
            rest = _state(engine, held, found["has_stepped"], is_loading=True)
            del rest["model"]
            loaded = dist_checkpointing.load(rest, str(folder))
            if engine.optimizer is not None and found["has_stepped"]:
                engine.optimizer.load_state_dict(loaded["optimizer"])
            elif engine.optimizer is not None:
                engine.optimizer.reload_model_params()
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(loaded["rate"])
        if "random" in found:
            random_state.put(found["random"])

    for action in (check, read_weights):
        on_all(action, program)
    with reading():
        on_all(read_rest, program)


def _state(engine: MegatronEngine, held: Held, has_stepped: bool, is_loading: bool) -> dict[str, Any]:
    """Everything of a checkpoint, as Megatron wants it. Collective."""
    state: dict[str, Any] = {"model": held.sharded(held.tensors)}
    if engine.optimizer is not None and has_stepped:
        if is_loading:
            prepared(engine.optimizer.optimizer)
        state["optimizer"] = engine.optimizer.sharded_state_dict(state["model"], is_loading, metadata=_RESHARDABLE)
    if engine.lr_scheduler is not None:
        state["rate"] = engine.lr_scheduler.state_dict()
    return state


def _has_stepped(engine: MegatronEngine) -> bool:
    return engine.optimizer is not None and bool(engine.optimizer.optimizer.state)


def _about(engine: MegatronEngine, held: Held) -> dict[str, Any]:
    optimizer = engine.optimizer
    kind = None if optimizer is None else type(optimizer.optimizer).__name__
    return {
        "precision": engine.options.precision,
        "distributed_optimizer": engine.options.distributed_optimizer,
        "optimizer": kind,
        "lr_scheduler": None if engine.lr_scheduler is None else type(engine.lr_scheduler).__name__,
        "groups": 0 if optimizer is None else len(optimizer.param_groups),
        "shapes": held.shapes,
        "layout": _layout(engine),
        "has_stepped": _has_stepped(engine),
    }


_WORDS = {
    "precision": "precision",
    "distributed_optimizer": "distributed_optimizer",
    "optimizer": "the optimizer",
    "lr_scheduler": "the learning rate's schedule",
    "groups": "the number of the optimizer's groups",
}


def _checked(folder: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = json.loads((folder / _ABOUT).read_text())
    except FileNotFoundError:
        raise BuildError(f"{str(folder)!r} is no complete checkpoint of this target: it has no {_ABOUT}") from None
    for key, word in _WORDS.items():
        if key not in saved:
            raise BuildError(f"{str(folder)!r} is a checkpoint of another target; load it there")
        if saved[key] != own[key]:
            raise BuildError(f"saved with {saved[key]!r} for {word}, but this engine has {own[key]!r}; build with the same")
    shapes: dict[str, Any] = saved["shapes"]
    for name in sorted(shapes.keys() ^ own["shapes"].keys()):
        where = "the checkpoint, not the model" if name in shapes else "the model, not the checkpoint"
        raise BuildError(f"{name!r} is in {where}; load it into the same model")
    for name, shape in own["shapes"].items():
        if shapes[name] != shape:
            raise BuildError(f"{name!r} was saved with the shape {shapes[name]}, and has {shape}; load it into the same model")
    return saved


def _layout(engine: MegatronEngine) -> dict[str, int]:
    program = engine.program
    return {**{axis: program.axis_size(axis) for axis in ("pp", "dp", "tp")}, "stages": len(program.stages)}


def _random_file(folder: Path) -> Path:
    return folder / f"random-{dist.get_rank()}.pt"
