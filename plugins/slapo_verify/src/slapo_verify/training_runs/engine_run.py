"""Runs of an engine and of the unmodified model on the same batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from slapo_core import Schedule, VerifyError, build, gather_objects, parameter_facts
from slapo_training.distributed import full_state, over_group

from ..comparison.model_results import OptimizerFactory
from ..comparison.report import short_repr
from ..model_setup.model_copies import copy_model, fresh_schedule, replay
from ..model_setup.model_rollback import disable_dropout
from ..ranks.failure_propagation import Ranks
from .reference_run import LossFn, TrainingResults, to_double, train_reference

Scheduled = Callable[[nn.Module], Schedule]
_DTYPE_CONVERSIONS = {torch.bfloat16: nn.Module.bfloat16, torch.float16: nn.Module.half, torch.float64: nn.Module.double}
"""Conversions that keep complex numbers."""


@dataclass(frozen=True)
class EngineRun:
    """One model, batch and schedule, to be trained by several engines."""

    reference: nn.Module
    schedule: Callable[[], Schedule]
    batch: dict[str, Any]
    steps: int
    loss_fn: LossFn | None
    optimizer: OptimizerFactory
    options: dict[str, Any]

    @property
    def optimizer_name(self) -> str:
        """Name of the optimizer factory, the same on every rank."""
        return _option_text(self.optimizer)

    def reference_results(self, dtype: torch.dtype | None = None) -> TrainingResults:
        """Train the unmodified model, in its own dtype or ``dtype``, with those options of the engine that apply to it."""
        model = self.reference if dtype is None else _DTYPE_CONVERSIONS[dtype](copy_model(self.reference))
        clip, rate = (self.options.get(name) for name in ("clip", "lr_scheduler"))
        largest = clip if isinstance(clip, (int, float)) and clip > 0 else 0.0
        factory = rate if callable(rate) else None
        chosen = self.options.get("loss")
        return train_reference(model, self.batch, self.steps, self.loss_fn, self.optimizer, largest, factory, chosen)

    def train(self, target: str) -> tuple[TrainingResults, Schedule, list[str]]:
        """Train with a new engine. Return results, schedule, and a note of the layout and options. Collective."""
        sch = self.schedule()
        disable_dropout(sch.mod)
        ranks = Ranks.of(sch.mesh, sch.group if sch.mesh is None else None)
        return ranks.run_on_all(
            lambda: self._train_engine(sch, target), watched=False
        )  # engines look at their works themselves

    def _train_engine(self, sch: Schedule, target: str) -> tuple[TrainingResults, Schedule, list[str]]:
        share, layout = self.share(sch), _layout(sch)
        engine: Any = build(sch, target, optimizer=self.optimizer, loss_fn=self.loss_fn, **self.options)
        whole = getattr(engine, "whole_parameters", nullcontext)
        with closing(engine):
            with whole():
                before = _copies(engine.module)
            first = engine.eval_batch(**share).item()
            losses = [engine.train_batch(**share).item() for _ in range(self.steps)]
            evaluations = (first, engine.eval_batch(**share).item())
            with whole():
                after = _copies(engine.module)
                full = {name: value for name, value in full_state(sch).items() if value is not None}
        stages = len(sch.program.stages) if sch.program is not None else 1
        own = {name: each.detach() for name, each in self.reference.named_parameters(remove_duplicate=False)}
        held = [(copy, before[at]) for at, copy in after.items()]
        copies = [{name: to_double(new) - to_double(old[name]) for name, new in copy.items()} for copy, old in held]
        updates = {name: to_double(full[name]) - to_double(own[name]) for name in own if name in full}
        kinds = tuple(sorted({str(value.dtype) for copy in after.values() for value in copy.values()}))
        options = ", ".join(f"{name}={_option_text(value)}" for name, value in self.options.items()) or "all options by default"
        note = f"{target}: {layout}, {stages} stage{'s' if stages > 1 else ''}; {options}"
        return TrainingResults(target, tuple(losses), evaluations, updates, copies, kinds), sch, [note]

    def share(self, sch: Schedule) -> dict[str, Any]:
        """Return this data-parallel rank's rows of the batch."""
        mesh = sch.mesh
        if mesh is None or "dp" not in (mesh.mesh_dim_names or ()):
            return dict(self.batch)
        parts, rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
        cut = {name for name, value in self.batch.items() if isinstance(value, torch.Tensor) and value.dim()}
        rows = {len(self.batch[name]) for name in cut}
        if any(number % parts for number in rows):
            raise VerifyError(f"a batch of {min(rows)} rows cannot be divided among {parts} data-parallel ranks")
        return {name: value.chunk(parts)[rank] if name in cut else value for name, value in self.batch.items()}


def schedule_factory(schedule: Schedule | Scheduled, reference: nn.Module) -> Callable[[], Schedule]:
    """Return a function that makes the schedule of a new copy of the model."""
    if isinstance(schedule, Schedule):
        top = schedule.get_top_schedule()
        return lambda: replay(fresh_schedule(reference, top), top.journal.steps)
    if not callable(schedule):
        raise VerifyError(f"schedule is {short_repr(schedule)}; give a schedule, or a function that makes one of a model")

    def make() -> Schedule:
        sch = schedule(copy_model(reference))
        if not isinstance(sch, Schedule):
            raise VerifyError(f"the function that schedules gave {sch!r}; let it return the schedule")
        return sch.get_top_schedule()

    return make


def _copies(module: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's parameters by current name: full values, under each original name. Collective."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in module.named_parameters():
        value = over_group(parameter, torch.Tensor.detach)
        assert value is not None
        found[name] = dict.fromkeys(parameter_facts(parameter).names or (name,), value)
    return found


def gather_over_schedule(value: Any, sch: Schedule) -> list[Any]:
    """Return the value of each rank of the schedule. Collective."""
    return gather_objects(value, sch.mesh, sch.group if sch.mesh is None else None)


def _layout(sch: Schedule) -> str:
    sizes = {axis: sch.mesh[axis].size() for axis in sch.mesh.mesh_dim_names or ()} if sch.mesh is not None else {}
    ranks, axes = len(gather_over_schedule(None, sch)), ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    return f"{ranks} rank{'s' if ranks > 1 else ''}" + (f" ({axes})" if axes else "")


def _option_text(value: Any) -> str:
    """Return the text of a value, the same on every rank; a function by its name."""
    inner = value.func if isinstance(value, partial) else value
    return str(getattr(inner, "__qualname__", type(inner).__qualname__)) if callable(inner) else repr(value)
