"""Tuners: the search for the fastest configuration of a schedule, and the classic tuner of training scripts.

``tune`` searches the space of a schedule: symbols that ``space(space)`` and ``schedule(sch, space)`` declare
(``schedule_space``). ``sampling`` chooses the next configuration, ``subjects`` runs it on processes of its own
(``measurement``, ``trial``), ``study`` keeps the results in an Optuna storage, which may lie in the file of a classic
``Database``. optuna is imported when ``tune`` is first used.

The classic tuner (``tuner``, ``search_space``) runs a user's script and knows neither models nor schedules. ``Traversal`` is
the loop over a space: each level calls ``update_space`` on a copy that holds only the symbols fixed so far. If the function
compares an open symbol, the symbols created until then are fixed first. The whole space is traversed once before the first
trial, so an error in it costs no training. A trial is a session of its own, whose processes carry a mark in their environment,
because torchrun's workers start sessions that no process group reaches. ``database`` reads, merges and replaces its file under
a lock for every result; tuners share nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import lazy_names

from .search_space.space import Space
from .search_space.symbol import OpenSymbolError, Symbol, TuneError
from .study.database import Database

if TYPE_CHECKING:
    from .measurement.job import MeasurementSettings
    from .result_output import check_outputs, show_result
    from .sampling.search_plan import PlannedCandidate, SearchPlan
    from .schedule_space.schedule_file import RUN_SYMBOLS, schedule_values
    from .schedule_space.schedule_space import ScheduleSpace
    from .schedule_tuning import InterruptedTuning, tune
    from .search import Budget, print_progress
    from .study.trial_result import TrialResult
    from .tune_result import TuneResult
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "measurement.job": ["MeasurementSettings"],
            "sampling.search_plan": ["PlannedCandidate", "SearchPlan"],
            "schedule_space.schedule_file": ["RUN_SYMBOLS", "schedule_values"],
            "schedule_space.schedule_space": ["ScheduleSpace"],
            "schedule_tuning": ["InterruptedTuning", "tune"],
            "result_output": ["check_outputs", "show_result"],
            "search": ["Budget", "print_progress"],
            "study.trial_result": ["TrialResult"],
            "tune_result": ["TuneResult"],
        },
    )

__all__ = [
    "Budget",
    "Database",
    "InterruptedTuning",
    "MeasurementSettings",
    "OpenSymbolError",
    "PlannedCandidate",
    "RUN_SYMBOLS",
    "ScheduleSpace",
    "SearchPlan",
    "Space",
    "Symbol",
    "TrialResult",
    "TuneError",
    "TuneResult",
    "check_outputs",
    "print_progress",
    "schedule_values",
    "show_result",
    "tune",
]
