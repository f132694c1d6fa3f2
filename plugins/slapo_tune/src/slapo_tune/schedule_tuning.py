"""``slapo.tune``: the search for the fastest schedule of a model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_plan import Plan

from .measurement.job import AXES, MeasurementSettings, TrialJob, adamw
from .measurement.step_timing import LEAST_STEPS
from .planned_job import planned_job
from .sampling.search_plan import Predictions, SearchPlan
from .schedule_space.planned_space import PlannedSpace
from .schedule_space.schedule_file import SpaceFunction, copy_schedule
from .search import Budget, print_progress
from .search_space.symbol import TuneError
from .study.pruners import make_pruner
from .subjects.schedule_subject import ScheduleSubject
from .trial.process import MARK, Interruption, signal_name
from .tune_result import TuneResult, WriteSchedule
from .tuning_run import SearchSettings, run_search

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage


class InterruptedTuning(KeyboardInterrupt):
    """A signal ended the search. Trials that had ended are in the database.

    Args:
        result: The result so far.
    """

    def __init__(self, result: TuneResult) -> None:
        self.result = result
        super().__init__(f"interrupted by {signal_name(result.interrupted)}")


def tune(
    schedule: Callable[..., Any] | str | os.PathLike[str] | Plan,
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    trials: int = 20,
    database: str | os.PathLike[str] | BaseStorage | None = None,
    prune: SearchPlan | None = None,
    timeout: float | None = 120.0,
    seconds: float | None = None,
    space: SpaceFunction | None = None,
    layout: Mapping[str, int] | None = None,
    target: str = "torch",
    optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    sampler: str | BaseSampler = "plan",
    pruner: str | BasePruner = "interval",
    verify: bool = True,
    measurement: MeasurementSettings | None = None,
    device: str = "auto",
    name: str = "",
    seed: int = 0,
    report: Callable[[str], None] = print_progress,
    **options: Any,
) -> TuneResult:
    """Search the fastest schedule of a model: train a few steps with one configuration after the other.

    A trial runs on processes of its own, one per rank. The best trial is verified against the unmodified model; one that
    computes something else is a failure, and the next best is taken.

    Args:
        schedule: ``schedule(sch, space)``, which takes the steps and asks ``space`` for the values of symbols; the path of a
            Python file with such a function, in which ``space(space)`` may declare symbols first; or what ``slapo.plan``
            returned for this model and a batch of as many rows: its layouts are the space, and it is ``prune`` too. Its
            target, optimizer, loss function and options hold.
        model: The unmodified model, which stays as it is; or a function that makes it, called without memory for weights.
        batch: The whole batch of a training step, of all data-parallel ranks: a tensor, a tuple of positional arguments, a dict
            of keyword ones, or ``(args, kwargs)``.
        trials: Trials in the study, with those of earlier runs and other tuners on the database; refused configurations are not
            counted.
        database: Path of a JSON file, as of the classic ``Database``; the URL of an Optuna storage, such as
            ``"sqlite:///tune.db"``; or an Optuna storage. The same call goes on there. None keeps nothing.
        prune: A plan: its order of candidates is where the search starts, and what it proves impossible is skipped.
        timeout: Seconds of a trial; None for any.
        seconds: Seconds of the search, after which no trial starts; None for any.
        space: ``space(space)``, which declares symbols before the schedule; for a schedule that is a function.
        layout: Ranks of ``tp``, ``pp`` and ``dp``; 1 where it has none. Symbols of these names replace them.
        target: Name of a dialect.
        optimizer: ``parameters -> Optimizer``; default: AdamW.
        loss_fn: As for ``slapo.build``.
        sampler: ``"plan"``, which follows the plan and learns its error, ``"tpe"``, ``"random"``, or an Optuna sampler.
        pruner: What stops a slow trial: ``"interval"``, once its interval is clear of the best; Optuna's ``"median"`` and
            ``"hyperband"``; an Optuna pruner; or ``"none"``.
        verify: Whether the best is verified.
        measurement: How often a step is measured.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``: GPUs where there is one for every rank of ``layout``.
        name: Name of the study in the database; default: made of the model, batch, layout and target.
        seed: Of weights, ranks and sampler.
        report: Takes a line of progress; default: printed to stderr.
        **options: Of ``slapo.build``. Symbols called ``microbatches``, ``precision``, ``pipeline_schedule`` and
            ``data_parallel`` replace them.

    Returns:
        The result: ``best``, ``failures``, ``trials``, ``save("best.py")``.

    Raises:
        TuneError: the arguments, the space or the database cannot be used.
        InterruptedTuning: Ctrl-C or another signal; a ``KeyboardInterrupt`` whose ``result`` has the best so far.
    """
    if MARK in os.environ:
        raise TuneError("tune: called while a trial imports the script; call it under `if __name__ == '__main__':`")
    if unknown := set(layout or ()) - set(AXES):
        raise TuneError(f"tune: layout has {sorted(unknown)[0]!r}; its axes are pp, dp and tp")
    job = TrialJob(
        model,
        "",
        batch,
        space,
        layout=dict(layout or {}),
        target=target,
        optimizer=optimizer,
        loss_fn=loss_fn,
        options=options,
        seed=seed,
        measurement=measurement or MeasurementSettings(),
    )
    job, planned = _with_schedule(job, schedule)
    if planned and prune is not None:
        raise TuneError("tune: prune is for a schedule that is no plan; leave it out")
    function = job.space_function()
    if isinstance(job.schedule, str):
        job = replace(job, schedule=os.path.abspath(job.schedule))
    job = replace(job, device=_resolve_device(device, planned.candidates[0].settings if planned else job.layout))
    stopping = make_pruner(pruner, LEAST_STEPS, max(job.measurement.max_steps, LEAST_STEPS))
    settings = SearchSettings(Budget(trials, seconds), timeout, sampler, Predictions(planned or prune), verify, seed, stopping)
    subject = ScheduleSubject(job, function, timeout, name)
    write: WriteSchedule = planned.save if planned else subject.steps_source
    if isinstance(job.schedule, str):
        write = partial(copy_schedule, job.schedule)
    try:
        with Interruption() as interruption:
            result = replace(run_search(subject, database, settings, interruption, report), write_schedule=write)
    finally:
        subject.close()
    if planned:
        result = replace(result, skipped=(*result.skipped, *((each.settings, each.reason) for each in planned.rejected)))
    if result.interrupted:
        raise InterruptedTuning(result)
    return result


def _with_schedule(
    job: TrialJob, schedule: Callable[..., Any] | str | os.PathLike[str] | Plan
) -> tuple[TrialJob, PlannedSpace | None]:
    """Return a job with its schedule, and the space of a plan."""
    if isinstance(schedule, Plan):
        planned = PlannedSpace(schedule)
        return planned_job(job, schedule, planned), planned
    return replace(job, schedule=schedule if callable(schedule) else os.fspath(schedule)), None


def _resolve_device(device: str, layout: Mapping[str, int]) -> str:
    if device == "auto":
        ranks = math.prod(layout.get(axis, 1) for axis in AXES)
        return "cuda" if torch.cuda.device_count() >= max(1, ranks) else "cpu"
    if device not in ("cpu", "cuda"):
        raise TuneError(f"tune: device is {device!r}; use 'cpu', 'cuda' or 'auto'")
    return device
