"""Run of ``slapo tune --model``: the model and batch of ``slapo train`` as the subject, in the space of a file or of a plan."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slapo_core import ScheduleError, SlapoError, get_logger, init_empty_weights
from slapo_plan import Hardware, Plan, plan
from slapo_report import format_count
from slapo_tune import Budget, InterruptedTuning, TuneResult, check_outputs, print_progress, show_result, tune

from ..run_data.settings import VOCABULARY, Settings, SettingsError, is_folder
from .models import build_model
from .plan_run import known_facts

MOST_REASONS = 5
"""Sentences about what a plan rules out that are printed."""

_AXES = ("tp", "pp", "dp")


def run_tuning(
    settings: Settings,
    ranks: int = 0,
    hardware: str = "this-machine",
    constraints: Mapping[str, Any] | None = None,
    *,
    trials: int,
    timeout: float | None,
    seconds: float | None = None,
    save: str = "",
    page: str = "",
    options: Mapping[str, Any] | None = None,
    **search: Any,
) -> int:
    """Search the fastest schedule as the settings say, and return the exit status.

    Args:
        settings: Settings of the model and the run. Without a schedule file the space is a plan.
        ranks: Ranks that the plan lays out; 0 for ``settings.world_size``.
        hardware: Name or file of the plan's hardware.
        constraints: Values of ``tp``, ``pp`` and ``dp`` that the plan's layouts must have.
        trials: Trials in the study.
        timeout: Seconds of a trial; None for any.
        seconds: Seconds of the search; None for any.
        save: Path of a schedule file for the best, or ``""``.
        page: Path of the page, or ``""``.
        options: Of ``build``, which symbols replace.
        **search: Further arguments of ``slapo.tune``.

    Raises:
        SlapoError: the settings, the space or the database cannot be used.
    """
    replace(settings, microbatches=1, tp=1, pp=1, dp=1).check()
    if ranks < 0:
        raise SettingsError(f"--ranks {ranks}: not a positive number; use 1 or more")
    check_outputs(save, page)
    Budget(trials, seconds)
    generator = torch.Generator().manual_seed(settings.seed)
    ids = torch.randint(VOCABULARY, (settings.batch, settings.seq), generator=generator)
    with _without_warnings():
        given: dict[str, Any] = {"layout": {axis: getattr(settings, axis) for axis in _AXES}, **(options or {})}
        schedule: Any = settings.schedule
        if not schedule:
            try:
                schedule = plan_layouts(settings, ranks or settings.world_size, hardware, constraints or {}, options or {})
            except KeyboardInterrupt:
                print_progress("interrupted by SIGINT while it planned; no trial was started")
                raise
            given = {}
        try:
            result = tune(
                schedule,
                partial(build_model, settings),
                {"input_ids": ids, "labels": ids},
                trials=trials,
                timeout=timeout,
                seconds=seconds,
                target=settings.target,
                device=settings.device,
                name=study_name(settings),
                **given,
                **search,
            )
        except InterruptedTuning as interrupted:
            result = interrupted.result
    _print_skipped(result)
    return show_result(result, save, page, model_flags(settings))


def plan_layouts(
    settings: Settings, ranks: int, hardware: str, constraints: Mapping[str, Any], options: Mapping[str, Any]
) -> Plan:
    """Return the plan of a model whose candidates are to be tried.

    Raises:
        SettingsError: no layout of so many ranks has what is asked for.
        SlapoError: unknown hardware, or a model that does not run on fake tensors.
    """
    product = math.prod(constraints.values())
    if ranks % product or len(constraints) == len(_AXES) and product != ranks:
        words = " x ".join(f"--{axis} {size}" for axis, size in constraints.items())
        near = product * max(1, round(ranks / product))
        raise SettingsError(f"{words} does not make {format_count(ranks, 'rank')}; use --ranks {near}")
    cluster = Hardware.load(hardware)
    with init_empty_weights():
        model = build_model(settings)
    ids = torch.zeros(1, settings.seq, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    print_progress(f"planning {format_count(ranks, 'rank')} of {cluster.name}")
    try:
        found = plan(
            model,
            batch,
            ranks=ranks,
            global_batch=settings.batch,
            hardware=cluster,
            constraints=constraints,
            target=settings.target,
            **options,
        )
    except ScheduleError as err:
        raise SlapoError(
            f"{err}; known without it: {known_facts(model, cluster)}; or give --schedule FILE with a space"
        ) from err
    if found.candidates:
        print_progress(f"{len(found.candidates)} layouts may fit, the fastest by the plan: {found.best}")
    return found


def study_name(settings: Settings) -> str:
    """Return a name that is equal for equal models, batches and layouts; a plan adds its own."""
    sizes = (
        f"{settings.layers} layers, hidden {settings.hidden}, {settings.heads} heads, batch {settings.batch} x {settings.seq}"
    )
    layout = f"tp {settings.tp}, pp {settings.pp}, dp {settings.dp}; " if settings.schedule else ""
    return f"{settings.schedule or 'layouts'} of {settings.model}: {sizes}; {layout}{settings.target}"


def model_flags(settings: Settings) -> dict[str, Any]:
    """Return the flags of ``slapo train`` for the model and its batch."""
    if is_folder(settings.model):
        return {"model": str(Path(settings.model).resolve()), "seq": settings.seq, "batch": settings.batch}
    return {name: getattr(settings, name) for name in ("model", "layers", "hidden", "heads", "seq", "batch")}


def _print_skipped(result: TuneResult) -> None:
    sentences = [*dict.fromkeys(f"{_short(values)}: {sentence}" for values, sentence in result.skipped)]
    for sentence in sentences[:MOST_REASONS]:
        print_progress(f"skipped {sentence}")
    if len(sentences) > MOST_REASONS:
        print_progress(f"skipped {len(sentences) - MOST_REASONS} more; --report lists them")


def _short(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items() if value is not False)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out the log's notes on checks that a search turns off, and its warnings about layouts that it tries."""
    logger = get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
