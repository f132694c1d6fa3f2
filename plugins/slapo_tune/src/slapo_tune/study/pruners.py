"""Pruners by name: rules that stop a trial as it reports its throughput."""

from __future__ import annotations

from collections.abc import Callable

from optuna import Study
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.trial import FrozenTrial, TrialState

from slapo_core import UnknownNameError

SLOWER = 1.1
"""The interval pruner stops a trial once the best throughput is this multiple of the upper end of its interval."""

INTERVAL = "interval"
"""User attribute with the interval of the last report, of the trial that a pruner is asked about."""


class IntervalPruner(BasePruner):
    """The tuner's own pruner: it stops a trial whose interval is clear of the best throughput so far.

    Trials that were refuted by the verification are not the best.
    """

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Return True if the trial is slower than the best, beyond its measurement error."""
        interval, best = trial.user_attrs.get(INTERVAL), best_throughput(study)
        return interval is not None and best is not None and SLOWER * interval[1] < best


def best_throughput(study: Study) -> float | None:
    """Return the highest throughput of the trials that were measured to the end and not refuted; None if there is none."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    verdicts = study.user_attrs
    refuted = {each.number for each in complete if verdicts.get(f"verified.{each.number}", {}).get("verified") is False}
    return max((each.values[0] for each in complete if each.number not in refuted), default=None)


PRUNERS: dict[str, Callable[[int, int | None], BasePruner]] = {
    "interval": lambda first, last: IntervalPruner(),
    "median": lambda first, last: MedianPruner(),
    "hyperband": lambda first, last: HyperbandPruner(min_resource=first, max_resource="auto" if last is None else last),
    "none": lambda first, last: NopPruner(),
}
"""Pruners by name; each takes the first step that a trial reports, and the last one if it is known."""


def make_pruner(pruner: str | BasePruner, first: int = 1, last: int | None = None) -> BasePruner:
    """Return a pruner by its name, or the given one.

    Args:
        pruner: A name of ``PRUNERS``, or an Optuna pruner.
        first: First step that a trial reports.
        last: Last step of a trial; None if it is not known.

    Raises:
        UnknownNameError: no such name.
    """
    if isinstance(pruner, BasePruner):
        return pruner
    if not isinstance(pruner, str) or pruner not in PRUNERS:
        raise UnknownNameError.of("pruner", str(pruner), PRUNERS)
    return PRUNERS[pruner](first, last)


def pruner_name(pruner: BasePruner) -> str:
    """Return the name of a pruner for sentences, ``"median"`` for a ``MedianPruner``."""
    return type(pruner).__name__.removesuffix("Pruner").lower()
