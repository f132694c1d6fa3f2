"""Run of ``slapo tune --model``: the model and batch of ``slapo train`` as the subject, and a space without a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from slapo_core import Schedule
from slapo_tune import InterruptedTuning, ScheduleSpace, show_result, tune

from ..run_data.settings import VOCABULARY, Settings
from .models import build_model
from .run_schedule import apply_default_steps, find_layers

MOST_MICROBATCHES = 16


def run_tuning(
    settings: Settings, ranks: int, *, trials: int, timeout: float | None, save: str = "", page: str = "", **options: Any
) -> int:
    """Search the fastest schedule as the settings say, and return the exit status.

    Args:
        settings: Settings of the model and the run.
        ranks: Ranks to lay out in the space of a model without a schedule file; 0 for ``settings.world_size``.
        trials: Trials in the study.
        timeout: Seconds of a trial; None for any.
        save: Path of a schedule file for the best, or ``""``.
        page: Path of the page, or ``""``.
        **options: Further arguments of ``slapo.tune``.

    Raises:
        SlapoError: the settings, the space or the database cannot be used.
    """
    replace(settings, microbatches=1, tp=1, pp=1, dp=1).check()
    generator = torch.Generator().manual_seed(settings.seed)
    ids = torch.randint(VOCABULARY, (settings.batch, settings.seq), generator=generator)
    space = None if settings.schedule else partial(default_space, settings, ranks or settings.world_size)
    try:
        result = tune(
            settings.schedule or partial(default_schedule, settings),
            partial(build_model, settings),
            {"input_ids": ids, "labels": ids},
            trials=trials,
            timeout=timeout,
            space=space,
            layout={"tp": settings.tp, "pp": settings.pp, "dp": settings.dp},
            target=settings.target,
            device=settings.device,
            name=study_name(settings, ranks),
            **options,
        )
    except InterruptedTuning as interrupted:
        result = interrupted.result
    return show_result(result, save, page)


def study_name(settings: Settings, ranks: int) -> str:
    """Return a name that is equal for equal models, batches and layouts."""
    sizes = (
        f"{settings.layers} layers, hidden {settings.hidden}, {settings.heads} heads, batch {settings.batch} x {settings.seq}"
    )
    layout = f"{ranks} ranks" if ranks else f"tp {settings.tp}, pp {settings.pp}, dp {settings.dp}"
    return f"{settings.schedule or 'layouts'} of {settings.model}: {sizes}; {layout}; {settings.target}"


def default_space(settings: Settings, ranks: int, space: ScheduleSpace) -> None:
    """Declare the layouts of so many ranks, the number of micro-batches, and the number of recomputed layers."""
    tp = space.choice("tp", [size for size in _divisors(ranks) if settings.heads % size == 0])
    stages = [size for size in _divisors(ranks // tp) if size <= settings.layers]
    pp = space.choice("pp", [size for size in stages if settings.batch % (ranks // (tp * size)) == 0])
    dp = space.choice("dp", [ranks // (tp * pp)])
    space.choice("microbatches", [size for size in _divisors(settings.batch // dp) if size <= MOST_MICROBATCHES])
    if dp > 1 and settings.target == "torch":
        space.choice("data_parallel", ["ddp", "fsdp"])
    space.int("checkpointed", 0, settings.layers, max(1, settings.layers // 4))


def default_schedule(settings: Settings, sch: Schedule, space: Mapping[str, Any]) -> None:
    """Take the steps of a configuration of ``default_space``."""
    layers = find_layers(sch.mod, settings)
    apply_default_steps(sch, replace(settings, tp=space["tp"], pp=space["pp"], checkpoint_layers=False))
    for path in layers[: space["checkpointed"]]:
        sch[path].checkpoint()


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
