"""Subject of a trial: model, schedule, batch, layout and options, as one object that a file can hold."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slapo_core import (
    Schedule,
    ScheduleError,
    create_schedule,
    forward_signature,
    init_empty_weights,
    load_schedule,
    materialize,
    split_inputs,
)

from ..schedule_space.schedule_file import RUN_SYMBOLS, SpaceFunction, declare, read_schedule_file, takes_space
from ..schedule_space.schedule_space import ScheduleSpace
from ..search_space.symbol import TuneError

AXES = ("pp", "dp", "tp")

BUILD_SYMBOLS = tuple(name for name in RUN_SYMBOLS if name not in AXES)
"""Symbols that are options of ``slapo.build``."""

_MAIN_KEYS = ("sys_path", "dir", "init_main_from_name", "init_main_from_path")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of a trial that is given none."""
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class MeasurementSettings:
    """Limits on the number of measured training steps.

    Args:
        warmup: Steps before the first that counts.
        precision: Half width of the interval of the median step, relative to it, at which measuring ends.
        max_steps: Steps after which it ends in any case.
        max_seconds: Seconds after which it ends once there is an interval.
    """

    warmup: int = 2
    precision: float = 0.02
    max_steps: int = 40
    max_seconds: float = 10.0


@dataclass(frozen=True)
class TrialJob:
    """The subject of all trials of a tuning.

    Args:
        model: The unmodified model, or a function that makes it.
        schedule: ``schedule(sch, space)``, ``schedule(sch)``, or the path of a schedule file.
        batch: The whole batch of a step, of all data-parallel ranks, as ``slapo.verify_engine`` takes it.
        space: ``space(space)`` of a schedule that is a function, or None.
        layout: Sizes of ``pp``, ``dp`` and ``tp`` where no symbol sets them.
        target: Name of a dialect.
        optimizer: ``parameters -> Optimizer``.
        loss_fn: As for ``slapo.build``.
        options: Of ``slapo.build``; symbols of ``BUILD_SYMBOLS`` replace them.
        device: ``"cpu"`` or ``"cuda"``.
        seed: Of the weights, and of the ranks' generators.
        measurement: How often a step is measured.
        run_options: Returns the options of ``slapo.build`` of a configuration; default: its symbols of ``BUILD_SYMBOLS``.
        title: Name of the schedule in the name of the study; default: that of its function or file.
    """

    model: nn.Module | Callable[[], nn.Module]
    schedule: Callable[..., Any] | str
    batch: Any
    space: SpaceFunction | None = None
    layout: Mapping[str, int] = field(default_factory=dict)
    target: str = "torch"
    optimizer: Callable[..., torch.optim.Optimizer] = adamw
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    seed: int = 0
    measurement: MeasurementSettings = MeasurementSettings()
    run_options: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    title: str = ""

    def sizes(self, values: Mapping[str, Any]) -> tuple[int, int, int]:
        """Return the sizes of ``pp``, ``dp`` and ``tp`` of a configuration."""
        found = [values.get(axis, self.layout.get(axis, 1)) for axis in AXES]
        for axis, size in zip(AXES, found, strict=True):
            if type(size) is not int or size < 1:
                raise TuneError(f"symbol {axis!r}: {size!r} is no number of ranks; use 1 or more")
        return found[0], found[1], found[2]

    def build_options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of ``build`` of a configuration, all but optimizer and loss function."""
        if self.run_options is not None:
            return {**self.options, **self.run_options(values)}
        return {**self.options, **{name: values[name] for name in BUILD_SYMBOLS if name in values}}

    def space_function(self) -> SpaceFunction | None:
        """Return the function that declares symbols before the schedule: the job's, or that of its schedule file.

        Raises:
            TuneError: the file cannot be used, or there are both.
        """
        if not isinstance(self.schedule, str):
            return self.space
        if self.space is not None:
            raise TuneError("tune: space is for a schedule that is a function; in a file define space(space)")
        function: SpaceFunction | None = read_schedule_file(self.schedule).get("space")
        return function

    @property
    def rows(self) -> int:
        """Samples in the batch."""
        return _rows(self.batch)

    def empty_model(self) -> nn.Module:
        """Return a copy of the model whose parameters are on the meta device; buffers keep their values."""
        if not isinstance(self.model, nn.Module):
            with init_empty_weights():
                return self.model()
        tensors = {id(each): nn.Parameter(each.detach().to("meta"), each.requires_grad) for each in self.model.parameters()}
        return copy.deepcopy(self.model, dict(tensors))

    def trial_model(self) -> nn.Module:
        """Return the model of a trial: on the device with its weights, or without weights where ``model`` is a function."""
        if isinstance(self.model, nn.Module):
            has_weights = not any(each.is_meta for each in self.model.parameters())
            return self.model.to(self.device) if has_weights else self.model
        with init_empty_weights():
            return self.model()

    def whole_model(self) -> nn.Module:
        """Return the unmodified model with weights, the same on every rank."""
        model = self.trial_model()
        create_schedule(model)  # names the parameters, which seeds their values
        materialize(model, seed=self.seed, device=self.device)
        return model.to(self.device)

    def make_schedule(self, model: nn.Module, mesh: DeviceMesh, space: ScheduleSpace, values: Mapping[str, Any]) -> Schedule:
        """Schedule a model.

        Args:
            model: A new copy of the unmodified model.
            mesh: Mesh with the axes ``AXES``.
            space: Is asked for the values of symbols.
            values: Those that are known: all in a trial, those of ``space(space)`` before the first.
        """
        inputs = self.example_inputs(model, values)
        if isinstance(self.schedule, str):
            return load_schedule(model, self.schedule, mesh=mesh, example_inputs=inputs, config=space)
        sch = create_schedule(model, mesh=mesh, example_inputs=inputs)
        declare(self.space, space)
        self.schedule(*((sch, space) if takes_space(self.schedule) else (sch,)))
        return sch

    def example_inputs(self, model: nn.Module, values: Mapping[str, Any]) -> Any:
        """Return one micro-batch of a data-parallel rank, without labels that only the loss function takes."""
        microbatches = self.build_options(values).get("microbatches", 1)
        parts = self.sizes(values)[1] * microbatches
        if self.rows % parts:
            raise ScheduleError(
                f"a batch of {self.rows} rows cannot be divided among {self.sizes(values)[1]} data-parallel ranks x "
                f"{microbatches} micro-batches; use a multiple of {parts}"
            )
        args, kwargs = self.share(parts, 0)
        names = forward_signature(model).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in names.values())
        return args, {name: value for name, value in kwargs.items() if takes_any or name in names}

    def share(self, parts: int, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the rows of one of equal parts of the batch."""
        args, kwargs = split_inputs(self.batch)

        def rows_of(value: Any) -> Any:
            is_batched = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == self.rows
            return value.chunk(parts)[index].to(self.device) if is_batched else value

        return tuple(map(rows_of, args)), {name: rows_of(value) for name, value in kwargs.items()}

    def save(self, path: Path) -> None:
        """Write the job to a file, with what its process needs to import the caller's script.

        Raises:
            TuneError: a part cannot be pickled, such as a function that no module holds.
            OSError: the file cannot be written.
        """
        main = {name: value for name, value in spawn.get_preparation_data("trial").items() if name in _MAIN_KEYS}
        try:
            torch.save(main, path.with_suffix(".main"))
            torch.save(self, path)
        except OSError:
            raise
        except Exception as err:
            if part := _unpicklable_part(self):
                advice = "define functions and classes at the top level of a module, or give the path of a schedule file"
                raise TuneError(f"tune: a trial's processes cannot be given {part}: {err}; {advice}") from err
            raise OSError(f"the model and the batch do not fit there, {err}") from err  # torch.save says it so

    @staticmethod
    def load(path: Path) -> TrialJob:
        """Read a job, in the process of a trial; the caller's script is imported as ``multiprocessing`` does it."""
        spawn.prepare(torch.load(path.with_suffix(".main"), weights_only=False))  # safe to unpickle: the tuner wrote it
        job: TrialJob = torch.load(path, weights_only=False)
        return job


def _rows(batch: Any) -> int:
    for leaf in torch.utils._pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    raise TuneError("batch: it has no tensor with rows; give the arguments of the model's forward")


def _unpicklable_part(job: TrialJob) -> str:
    """Return the name of a part that cannot be pickled, or ``""``."""
    for name in ("schedule", "space", "model", "batch", "optimizer", "loss_fn", "options", "run_options"):
        try:
            pickle.dumps(getattr(job, name))
        except Exception:
            return name
    return ""
