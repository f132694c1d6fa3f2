"""The search: the next configuration, its trial, its result, until the budget is spent; then the verification of the best."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from slapo_core import UnknownNameError

from .sampling.plan_sampler import PlanSampler
from .sampling.search_plan import Predictions
from .schedule_space.exploration import ExhaustedError, Exploration, Path, ReplayedSpace, enumerate_space
from .schedule_space.schedule_space import SymbolDefinition, value_key
from .search_space.space import Space
from .search_space.symbol import TuneError
from .study.trial_result import FAILED, REFUSED, TrialResult
from .study.tuning_study import TuningStudy, parameter_name
from .subjects.subject import Subject, UnfinishedVerificationError
from .trial.process import Interruption

LARGEST_SPACE = 20_000
"""Configurations of a space up to which all are enumerated."""

MOST_REFUSALS = 10
"""Refused configurations for each trial of the budget, after which the search ends."""


def _tpe(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # of the arguments that conditional symbols need
        return TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)


SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {"random": lambda seed: RandomSampler(seed=seed), "tpe": _tpe}
"""Samplers by name, beside ``"plan"``, the tuner's own."""

SkippedConfiguration = tuple[Path, str]
"""A configuration that the plan rules out, and its sentence."""


@dataclass(frozen=True)
class Budget:
    """End of a search.

    Args:
        trials: Trials in the study, of all tuners that share it, not counting refused configurations.
        seconds: Seconds of this search; None for any.

    Raises:
        TuneError: these are no numbers above 0.
    """

    trials: int
    seconds: float | None = None

    def __post_init__(self) -> None:
        if type(self.trials) is not int or self.trials < 1:
            raise TuneError(f"tune: trials is {self.trials!r}; give a whole number from 1 on")
        check_seconds("seconds", self.seconds)


def check_seconds(name: str, seconds: float | None) -> None:
    """Raise ``TuneError`` for a limit that is no number of seconds above 0."""
    if seconds is not None and (not isinstance(seconds, (int, float)) or not seconds > 0):
        raise TuneError(f"tune: {name} is {seconds!r}; give seconds above 0, or None")


def print_progress(text: str) -> None:
    """Write a line of progress to stderr."""
    print(f"tune: {text}", file=sys.stderr, flush=True)


class Search:
    """Search of one subject's space.

    Args:
        subject: What is tuned.
        study: Where trials are kept.
        sampler: Name of a sampler, ``"plan"``, ``"tpe"`` or ``"random"``, or an Optuna sampler.
        predictions: Of a plan.
        budget: When to end.
        interruption: What ends it earlier.
        report: Takes a line of progress.
        seed: Of the sampler.

    Attributes:
        skipped: What the plan ruled out.
    """

    def __init__(
        self,
        subject: Subject,
        study: TuningStudy,
        sampler: str | BaseSampler,
        predictions: Predictions,
        budget: Budget,
        interruption: Interruption,
        report: Callable[[str], None] = print_progress,
        seed: int = 0,
    ) -> None:
        self._subject, self._study, self._predictions, self._budget = subject, study, predictions, budget
        self._interruption, self._report = interruption, report
        self._start = time.monotonic()
        self.pool = self._enumerate()
        found = [(path, predictions.impossible(values_in(path))) for path in self.pool or ()]
        self.skipped: list[SkippedConfiguration] = [each for each in found if each[1]]
        self.sampler = self._make_sampler(sampler, seed)
        self._check_earlier_trials()

    def _enumerate(self) -> list[Path] | None:
        if self._subject.space_function is None:
            return None
        pool = enumerate_space(self._subject.space_function, LARGEST_SPACE)
        return pool or None

    def _make_sampler(self, sampler: str | BaseSampler, seed: int) -> BaseSampler:
        if isinstance(sampler, BaseSampler):
            return sampler
        if sampler == "plan":
            return PlanSampler(self.pool, self._predictions, seed)
        if sampler not in SAMPLERS:
            raise UnknownNameError.of("sampler", sampler, ["plan", *SAMPLERS])
        return SAMPLERS[sampler](seed)

    def _check_earlier_trials(self) -> None:
        """Refuse a database of another space before the first trial."""
        results = self._study.results()
        if self._subject.space_function is not None:
            for result in results:
                self._subject.space_function(ReplayedSpace(result.values))
        for result in [each for each in results if each.is_measured][:1]:  # scheduling a model takes time
            space = ReplayedSpace(result.values)
            self._subject.declare(space)
            if left := [name for name in result.values if name not in space]:
                raise TuneError(
                    f"the database is of another space: an earlier trial has symbol {left[0]!r}, which is not declared; use "
                    "another database or name"
                )

    def run(self) -> None:
        """Run trials until the budget is spent, the space is exhausted, or a signal comes."""
        refusals = 0
        while self._interruption.number is None and self._remaining_trials() > 0 and self._remaining_seconds() > 0:
            try:
                path, refusal = self._next_configuration()
            except ExhaustedError:
                self._report("all configurations of the space have been tried")
                return
            if not path:
                raise TuneError("the schedule declares no symbol; declare one, e.g. space.int('checkpointed', 0, 12)")
            refusals += bool(refusal)
            if refusals > MOST_REFUSALS * self._budget.trials:
                raise TuneError(f"{refusals} configurations have been refused, the last one: {refusal}; mend the space")
            with self._interruption.defer_signals():  # no result of a trial is lost
                self._take(path, refusal)

    def _take(self, path: Path, refusal: str) -> None:
        values = values_in(path)
        predicted = self._predictions.seconds(values)
        number = self._study.claim(path, predicted)
        if number is None:
            return
        if refusal:
            result: TrialResult | None = TrialResult(number, values, REFUSED, message=refusal, predicted=predicted)
        else:
            result = self._subject.measure(number, values, partial(self._study.report, number), self._interruption)
        if result is None:
            self._study.abandon(number)
            return
        self._study.finish(replace(result, predicted=predicted), self._subject.command)
        self._report(self._progress(result))

    def _next_configuration(self) -> tuple[Path, str]:
        """Return an untried configuration that the plan does not rule out, and the sentence if it is refused."""
        while True:
            explored = Exploration([*self._study.paths(), *(path for path, _ in self.skipped)])
            space = explored.untried_space(self._chooser())
            refusal = self._subject.declare(space)
            if not (impossible := self._predictions.impossible(dict(space))):
                return space.path, refusal
            self.skipped.append((space.path, impossible))

    def _chooser(self) -> Callable[[SymbolDefinition, Any, Sequence[Any]], Any]:
        """Return a function that asks the sampler for the value of a symbol, among those left.

        The sampler gets a study in memory with the trials that count, so a proposal that is not taken leaves nothing behind.
        """
        known = self._study.trials()
        scratch = optuna.create_study(direction="maximize", sampler=self.sampler)
        for trial in known:
            scratch.add_trial(trial)
        first = not known and not self._predictions
        asked = scratch.ask()

        def choose(symbol: SymbolDefinition, default: Any, left: Sequence[Any]) -> Any:
            name, candidates = parameter_name(symbol), symbol.candidates
            if first:
                return nearest(symbol, default, left)
            if symbol.kind == "choice":
                return nearest(symbol, asked.suggest_categorical(name, candidates), left)
            step = candidates[1] - candidates[0] if candidates[1:] else 1
            return nearest(symbol, asked.suggest_int(name, candidates[0], candidates[-1], step=step), left)

        return choose

    def _remaining_trials(self) -> int:
        known = self._study.trials()
        results = {result.number: result.state for result in self._study.results()}
        return self._budget.trials - sum(results.get(trial.number) != REFUSED for trial in known)

    def _remaining_seconds(self) -> float:
        if self._budget.seconds is None:
            return math.inf
        return self._budget.seconds - (time.monotonic() - self._start)

    def _progress(self, result: TrialResult) -> str:
        results = self._study.results()
        counted = sum(each.state != REFUSED for each in results)
        best = best_of(results)
        line = f"trial {counted}/{self._budget.trials} {result} in {result.wall_seconds:.1f} s"
        if result.state == REFUSED:
            line = str(result)
        line += f"; best so far {best.throughput:.5g} samples/s, trial {best.number}" if best else "; none has a throughput yet"
        if self._budget.seconds is not None:
            line += f"; {max(0.0, self._remaining_seconds()):.0f} s left"
        return line

    def verify_best(self) -> str:
        """Verify the fastest trial; trials that compute something else become failures, and the next one is verified.

        Returns:
            Sentence on a verification without a verdict, or ``""``. That trial stays the best, and the next run verifies it.
        """
        while (best := best_of(self._study.results())) is not None and best.verified is None:
            name = Space.cfg_dict_to_str(best.values)
            try:
                problem = self._subject.verify(best.values, self._interruption)
            except UnfinishedVerificationError as err:
                self._report(f"{name} could not be verified: {err}; it stays the best so far")
                return str(err)
            if problem is None:
                return ""
            verdict = replace(best, verified=not problem, message=problem, state=FAILED if problem else best.state)
            self._study.set_verified(verdict, self._subject.command)
            self._report(f"verified: {name}" if not problem else f"{name} is not the best: {problem}")
        return ""


def best_of(results: Sequence[TrialResult]) -> TrialResult | None:
    """Return the result with the highest throughput, of those that were measured to the end."""
    return max((each for each in results if each.is_measured), key=lambda each: each.throughput or 0.0, default=None)


def values_in(path: Path) -> dict[str, Any]:
    """Return the values of a configuration by symbol."""
    return {symbol.name: value for symbol, value in path}


def nearest(symbol: SymbolDefinition, value: Any, left: Sequence[Any]) -> Any:
    """Return a value, or where it is not left the one nearest to it in the order of the candidates."""
    if value_key(value) in map(value_key, left):
        return value
    place = symbol.index(value)
    return min(left, key=lambda each: abs(symbol.index(each) - place))
