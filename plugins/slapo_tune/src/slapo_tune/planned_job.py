"""The job of trials whose space is a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from slapo_plan import Plan

from .measurement.job import TrialJob, adamw
from .schedule_space.planned_space import PlannedSpace
from .search_space.symbol import TuneError


def planned_job(job: TrialJob, plan: Plan, planned: PlannedSpace) -> TrialJob:
    """Return a job with the space, the schedules, the target and the options of a plan.

    Args:
        job: The job without a schedule.
        plan: The plan.
        planned: Its space.

    Raises:
        TuneError: the job has what the plan decides, or is of another model, batch or target.
    """
    for name, given in (("space", job.space), ("layout", job.layout)):
        if given:
            raise TuneError(f"tune: {name} is for a schedule that is no plan; leave it out, or plan with constraints")
    own = {"optimizer": None if job.optimizer is adamw else job.optimizer, "loss_fn": job.loss_fn, **job.options}
    if other := [name for name, value in own.items() if value is not None and plan.options.get(name) is not value]:
        raise TuneError(f"tune: {other[0]} changes what the plan says; give it to slapo.plan, and leave it out here")
    if job.target not in ("torch", plan.target):
        raise TuneError(f"tune: the plan is for target {plan.target!r}, not {job.target!r}; plan for that target")
    rows = _rows(plan)
    if job.rows != rows:
        raise TuneError(f"tune: the batch has {job.rows} rows, and the plan is for {rows}; plan with global_batch={job.rows}")
    _check_model(job.empty_model(), plan.model)
    known = dict(plan.options)
    optimizer, loss_fn = known.pop("optimizer"), known.pop("loss_fn", None)
    return replace(
        job,
        schedule=planned.schedule,
        space=planned.declare,
        target=plan.target,
        optimizer=optimizer,
        loss_fn=loss_fn,
        options=known,
        run_options=planned.build_options,
        title=f"plan {planned.digest}",
    )


def _rows(plan: Plan) -> int:
    layout = plan.candidates[0].layout
    return layout.rows * layout.microbatches * layout.dp


def _check_model(model: nn.Module, planned: nn.Module) -> None:
    shapes: list[dict[str, Any]] = [{name: each.shape for name, each in of.named_parameters()} for of in (model, planned)]
    if shapes[0] != shapes[1]:
        counts = [sum(each.numel() for each in of.parameters()) for of in (model, planned)]
        raise TuneError(
            f"tune: the plan is of a {type(planned).__name__} with {counts[1]} parameters, and the model is another: a "
            f"{type(model).__name__} with {counts[0]}; plan this model"
        )
