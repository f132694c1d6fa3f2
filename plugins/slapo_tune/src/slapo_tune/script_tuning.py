"""Search the fastest configuration of a training script, with the space of a schedule file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .sampling.search_plan import Predictions
from .schedule_space.schedule_file import copy_schedule
from .search import Budget, print_progress
from .study.pruners import make_pruner
from .subjects.script_subject import ScriptSubject
from .trial.process import Interruption, script_program
from .tune_result import TuneResult
from .tuning_run import SearchSettings, run_search


def search_script(
    command: Sequence[str],
    schedule: str,
    trials: int,
    timeout: float | None,
    seconds: float | None,
    database: Any = None,
    sampler: str = "plan",
    pruner: str = "interval",
    seed: int = 0,
    report: Callable[[str], None] = print_progress,
) -> TuneResult:
    """Search the fastest configuration of a script, and return the result; after a signal the result so far.

    Args:
        command: The script and its arguments.
        schedule: Schedule file that declares the space in ``space(space)``.
        trials: Trials in the study.
        timeout: Seconds of a trial; None for any.
        seconds: Seconds of the search; None for any.
        database: As for ``slapo.tune``.
        sampler: As for ``slapo.tune``.
        pruner: As for ``slapo.tune``, by the reports that the script prints.
        seed: Of the sampler.
        report: Takes a line of progress.
    """
    script, *arguments = command
    subject = ScriptSubject(script_program(script), script, arguments, schedule, timeout)
    settings = SearchSettings(
        Budget(trials, seconds), timeout, sampler, Predictions(None), verify=False, seed=seed, pruner=make_pruner(pruner)
    )
    with Interruption() as interruption:
        result = run_search(subject, database, settings, interruption, report)
    return replace(result, write_schedule=partial(copy_schedule, schedule))
