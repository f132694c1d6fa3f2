"""Checkpoints in Megatron's format, with a description of the engine and each rank's random states beside them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from slapo_core import BuildError, Program, compare_across_ranks
from slapo_training.checkpoint import Buffers, StateLoading
from slapo_training.checkpoint import folder as checkpoint_folder
from slapo_training.distributed import Ranks
from slapo_training.engines import Position, checkpoint_files
from slapo_training.external_engine import ExternalEngine
from slapo_training.model import copy_into
from slapo_training.optimizers import lr_scheduler_class, whole_tensor_checkpoint

from ..configuration.options import MegatronOptions
from ..optimizer.local_tensors import LocalTensors
from ..optimizer.optimizer_state import OptimizerState
from ..process_state._megatron_private import main_param
from .file_writer import MegatronFiles


class MegatronCheckpoints(ExternalEngine):
    """Part of Megatron's engine that saves and loads checkpoints.

    Attributes:
        groups: Megatron's ``ProcessGroupCollection``.
        has_stepped: True if the optimizer has stepped, here or before the loaded checkpoint.
    """

    groups: Any

    def __init__(self, program: Program, options: MegatronOptions) -> None:
        super().__init__(program, options)
        self.options = options
        self.has_stepped = False
        self._files = MegatronFiles()

    @property
    def _inner(self) -> Any:
        return None if self.optimizer is None else self.optimizer.optimizer

    def optimizer_state(self, held: LocalTensors) -> OptimizerState | None:
        """Return the optimizer's state by the names of these tensors; None without an optimizer."""
        return None if self.optimizer is None else OptimizerState(self.optimizer, self.groups.dp, self.options, held)

    def _prepare_save(
        self, path: str | PathLike[str], position: Position, ranks: Ranks, copies: Buffers | None
    ) -> Callable[[Ranks], None]:
        """Return a function that writes Megatron's checkpoint and the files beside it. Collective.

        The function takes the ranks to synchronize with. ``copies`` are as in ``MegatronFiles``.
        """
        program, held, common = self.program, LocalTensors(self.program), self._common_state()
        kept = self.optimizer_state(held)
        state: dict[str, Any] = {"model": held.sharded_tensors(held.tensors), "common": common}

        def check() -> None:
            _check_extra_state(program.module)
            if kept is not None:
                kept.check()

        def collect(folder: Path, ranks: Ranks) -> Callable[[Ranks], None]:
            if kept is not None:
                state["optimizer"] = kept.sharded_state(self.has_stepped, is_loading=False)
            write = self._files.prepare_write(state, folder, ranks, copies)
            found: list[bytes | None] = []
            ranks.run_on_all(lambda: found.append(whole_tensor_checkpoint.pack_state(self._inner, _master_tensors(held))))

            def put(meeting: Ranks) -> None:
                if (states := found[0]) is not None:
                    (folder / whole_tensor_checkpoint.file_of(meeting.index)).write_bytes(states)
                write(meeting)

            return put

        compare_across_ranks([f"what Megatron's checkpoint has once for all ranks, {common!r}"], program.mesh)
        ranks.run_on_all(check)
        if kept is not None:
            kept.check_across_ranks()
        given = path, self.options.target, program, self._facts(held), position, collect, ranks, held.buffers()
        return checkpoint_files.prepare_save(*given, self.averages, copies is not None)

    def _load(self, path: str | PathLike[str]) -> Position:
        """Load a checkpoint; return the saved position of training. Collective.

        Raises:
            BuildError: on every rank: there is no checkpoint, or it does not fit this engine, which is then unchanged.
        """
        from megatron.core import dist_checkpointing

        program, inner, rate = self.program, self._inner, self.lr_scheduler
        held, found = LocalTensors(program), dict[str, Any]()
        kept, ranks = self.optimizer_state(held), Ranks.of(program)
        complete = checkpoint_folder.open_checkpoint(path, self.options.target, ranks)
        has_stepped = complete.about["has_stepped"]

        def read() -> None:
            fresh = {key: torch.empty_like(tensor) for key, tensor in held.tensors.items()}
            state: dict[str, Any] = {"model": held.sharded_tensors(fresh)}
            if kept is not None:
                is_whole = complete.about["whole"]
                whole_tensor_checkpoint.check_kind(is_whole, inner)
                state["optimizer"] = kept.sharded_state(has_stepped and not is_whole, is_loading=True)
                if not is_whole:
                    _check_kept(complete.about, kept)
                else:
                    found["states"] = whole_tensor_checkpoint.read(complete.data, complete.about["places"])
            try:
                found["state"] = dist_checkpointing.load(state, str(complete.data))
            except (Exception, CheckpointException) as err:  # many types for missing or broken files
                raise BuildError(
                    f"{str(complete.folder)!r} is a broken checkpoint: {type(err).__name__}: {_first_line(err)}; load another"
                ) from err

        def put() -> None:
            state = found["state"]
            for key, saved in state["model"].items():
                copy_into(held.tensors[key], saved)
            if kept is not None:
                if not has_stepped:
                    inner.state.clear()
                kept.take(state["optimizer"])
                for group, saved in zip(inner.param_groups, state["common"]["groups"], strict=True):
                    group.update(saved)
                if "states" in found:
                    whole_tensor_checkpoint.put(inner, _master_tensors(held), found["states"])
            beside.put(held.buffers())
            self.has_stepped = has_stepped

        def load_scheduler() -> None:
            if rate is not None:
                saved = found["state"]["common"]["rate"]
                loading.load(lr_scheduler_class(rate), rate.load_state_dict, saved, lambda: copy.deepcopy(rate.state_dict()))

        own, loading = self._facts(held), StateLoading()
        ranks.run_on_all(lambda: _check(complete.about, own))
        with checkpoint_folder.read_context(complete):
            checkpoint_folder.verify(complete, ranks)
            beside = checkpoint_files.read_extras(complete, program, held.buffers())
            averages = self.averages.read(complete, ranks)
            is_new = inner is not None and not inner.state
            try:
                ranks.run_on_all(read)  # also initializes the optimizer's state
                ranks.run_on_all(load_scheduler)
            except Exception:
                loading.roll_back()
                if is_new:
                    inner.state.clear()
                raise
        with self._load_context():
            ranks.run_on_all(put)
        self.averages.put(averages)
        return beside.position

    def _common_state(self) -> dict[str, Any]:
        """Return the data that only the first rank writes: options of the optimizer's groups, and the schedule's state."""
        inner, rate = self._inner, self.lr_scheduler
        groups = [] if inner is None else [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
        return {"groups": groups, "rate": None if rate is None else rate.state_dict()}

    def _facts(self, held: LocalTensors) -> dict[str, Any]:
        """Return the description of the engine for the checkpoint, the same on every rank. Collective."""
        kept = self.optimizer_state(held)
        return {
            "precision": self.options.precision,
            **whole_tensor_checkpoint.facts_of(self._inner, self.lr_scheduler),
            "places": math.prod(self.program.axis_size(axis) for axis in ("pp", "dp", "tp")),
            "groups": 0 if kept is None else len(self.optimizer.param_groups),
            "group_of": {} if kept is None else kept.groups(),
            "shapes": held.shapes,
            "has_stepped": self.has_stepped,
            "kept": [] if kept is None else kept.state_names(),
        }


def _check_extra_state(model: nn.Module) -> None:
    """Raise ``BuildError`` if a module has an extra state."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state and module.get_extra_state() is not None:
            raise BuildError(
                f"{path!r} has extra state (get_extra_state), which a checkpoint of Megatron's does not keep; keep it in a "
                "buffer, or use target='torch'"
            )


def _check_kept(saved: Mapping[str, Any], own: OptimizerState) -> None:
    """Raise ``BuildError`` if the optimizer's states have other names than the saved ones."""
    before = saved["kept"]
    if saved["has_stepped"] and before != (now := own.state_names()):
        raise BuildError(
            f"saved with {', '.join(before)} in the optimizer's state, but this engine's has {', '.join(now)}; build with the "
            "same options of the optimizer"
        )


def _first_line(error: BaseException) -> str:
    """Return the first non-blank line of an error's text, at most 200 characters."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]


def _master_tensors(held: LocalTensors) -> dict[str, torch.Tensor]:
    """Return this rank's tensors, with the optimizer's fp32 copy in place of each parameter that has one."""
    return {key: main_param(tensor) for key, tensor in held.tensors.items()}


def _check(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another precision, optimizer, schedule, model or grouping of parameters."""
    of_steps = () if own["optimizer"] is None else ("optimizer", "lr_scheduler", "groups")
    checkpoint_files.check_same(saved, own, ("precision", *of_steps))  # an engine that only evaluates loads the weights alone
    checkpoint_files.check_shapes(saved["shapes"], own["shapes"])
    groups = saved["group_of"]
    for name, number in own["group_of"].items():
        if groups.get(name) != number:
            before = f"in group {groups[name]} of the optimizer" if name in groups else "untrained"
            raise BuildError(
                f"{name!r} was saved {before}, and is in group {number}; build with the same groups in the same order"
            )
