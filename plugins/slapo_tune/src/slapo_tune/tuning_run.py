"""One run of a tuner on a study: the search, the verification of the best, and the result."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .sampling.plan_sampler import PlanSampler
from .sampling.search_plan import Predictions
from .sampling.surrogate import Coordinates, importances
from .search import Budget, Search, best_of, check_seconds, print_progress, values_in
from .study.storage import open_storage
from .study.trial_result import TrialResult
from .study.tuning_study import TuningStudy
from .subjects.subject import Subject
from .trial.process import Interruption, signal_name
from .tune_result import TuneResult

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

FEWEST_TRIALS = 3
"""Trials from which on the importance of symbols is estimated."""


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a run.

    Args:
        budget: When to end.
        timeout: Seconds of a trial; None for any.
        sampler: Name of a sampler, or an Optuna sampler.
        predictions: Of a plan.
        verify: Whether the best is verified.
        seed: Of the sampler.
        pruner: Stops slow trials; None for the tuner's own.
    """

    budget: Budget
    timeout: float | None = None
    sampler: str | BaseSampler = "plan"
    predictions: Predictions = Predictions(None)
    verify: bool = True
    seed: int = 0
    pruner: BasePruner | None = None

    def __post_init__(self) -> None:
        check_seconds("timeout", self.timeout)


def run_search(
    subject: Subject,
    database: str | os.PathLike[str] | BaseStorage | None,
    settings: SearchSettings,
    interruption: Interruption,
    report: Callable[[str], None] = print_progress,
) -> TuneResult:
    """Search, verify the best, and return the result; after a signal the result so far.

    Raises:
        TuneError: the space or the database cannot be used. The best so far has been reported.
    """
    storage, classic = open_storage(database)
    study = TuningStudy(storage, subject.name, classic, settings.timeout, settings.pruner)
    search: Search | None = None
    problem = ""
    try:
        search = Search(
            subject,
            study,
            settings.sampler,
            settings.predictions,
            settings.budget,
            interruption,
            report,
            settings.seed,
        )
        search.run()
        if settings.verify and interruption.number is None:
            problem = search.verify_best()
    except KeyboardInterrupt:
        pass
    except BaseException:
        _report_best(study, report)
        raise
    finally:
        study.close()
    result = replace(_result(study, search, settings, interruption.number or 0), verification_problem=problem)
    if result.interrupted:
        goes_on = "the same call goes on there" if database is not None else "with a database it could go on"
        best = f"; best so far: {result.best}" if result.best else ""
        report(f"interrupted by {signal_name(result.interrupted)} after {len(result.trials)} trials; {goes_on}{best}")
    return result


def _report_best(study: TuningStudy, report: Callable[[str], None]) -> None:
    """Report the best of a search that ends with an error, as far as the study can be read."""
    try:
        best = best_of(study.results())
    except Exception:  # the first error says more
        return
    if best is not None:
        report(f"best so far: {best}")


def _result(study: TuningStudy, search: Search | None, settings: SearchSettings, interrupted: int) -> TuneResult:
    results = study.results()
    symbols = {symbol.name: symbol for path in study.paths() for symbol, _ in path}
    limits = {"search_seconds": settings.budget.seconds, "trial_seconds": settings.timeout}
    budget = {"trials": settings.budget.trials} | {name: limit for name, limit in limits.items() if limit is not None}
    return TuneResult(
        name=study.name,
        trials=tuple(results),
        best=best_of(results),
        skipped=tuple((values_in(path), sentence) for path, sentence in (search.skipped if search else ())),
        importances=_importances(study, search, settings, results),
        space={name: symbol.candidates for name, symbol in symbols.items()},
        budget=budget,
        interrupted=interrupted,
    )


def _importances(
    study: TuningStudy, search: Search | None, settings: SearchSettings, results: Sequence[TrialResult]
) -> dict[str, float]:
    if search is None or sum(each.throughput is not None for each in results) < FEWEST_TRIALS:
        return {}
    sampler = search.sampler
    if not isinstance(sampler, PlanSampler):
        sampler = PlanSampler(search.pool, settings.predictions, settings.seed)
    trials = [each for each in study.trials() if each.state.is_finished()]
    symbols = sampler.symbols(trials)
    surrogate, _ = sampler.fit(Coordinates(symbols), trials)
    pool = sampler.pool(symbols)
    return importances(surrogate, symbols, pool, sampler.log_predictions(pool))
