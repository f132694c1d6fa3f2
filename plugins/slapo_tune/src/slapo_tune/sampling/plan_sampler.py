"""The tuner's own Optuna sampler: a plan's order first, then a model of its error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

from ..schedule_space.exploration import Path
from ..schedule_space.schedule_space import SymbolDefinition, configuration_key, value_key
from ..study.tuning_study import distribution, parameter_name, path_of, values_of
from .search_plan import Predictions
from .surrogate import Array, Coordinates, Surrogate, expected_improvement

POOL_SIZE = 3000
"""Configurations that are compared in one choice; a larger space is sampled."""

LARGEST_SPREAD = 6
"""Most trials that are spread over the space before the model chooses, without a plan."""

FAILURE_PENALTY = math.log(1.5)
"""A failed trial counts as slower than the slowest by this logarithm of a factor."""


class PlanSampler(BaseSampler):
    """Sampler of the configuration with the largest expected improvement under a ``Surrogate``.

    With a plan the first trial is its fastest candidate. Without one the first is the default configuration, and a few more are
    spread over the space.

    Args:
        pool: All configurations of the space, if they could be enumerated.
        predictions: Of the plan.
        seed: Of the choices among equals and of samples.
    """

    def __init__(self, pool: Sequence[Path] | None = None, predictions: Predictions | None = None, seed: int = 0) -> None:
        self._pool = None if pool is None else [{symbol.name: value for symbol, value in path} for path in pool]
        self._declared = list(dict.fromkeys(symbol for path in pool or () for symbol, _ in path))
        self._predictions = predictions or Predictions(None)
        self._generator = np.random.default_rng(seed)
        self._independent = RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the distributions of all symbols that the space declares or trials had."""
        seen = [symbol for each in _trials(study) for symbol, _ in path_of(each)]
        return {parameter_name(symbol): distribution(symbol) for symbol in [*self._declared, *seen]}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the values of the next configuration; those of symbols that it turns out not to have are ignored."""
        trials = _trials(study)
        values = self.next_values(trials)
        symbols = [*self._declared, *(symbol for each in trials for symbol, _ in path_of(each))]
        chosen = {parameter_name(each): values[each.name] for each in symbols if each.index(values.get(each.name)) >= 0}
        return {name: value for name, value in chosen.items() if name in search_space}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a random value for a symbol that was not known before."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def next_values(self, trials: Sequence[FrozenTrial]) -> dict[str, Any]:
        """Return the values of the next configuration; empty where nothing is known yet."""
        symbols = self.symbols(trials)
        tried = [values_of(each) for each in trials]
        pool = self._untried_pool(symbols, tried)
        if not pool:
            return {}
        predicted = self.log_predictions(pool)
        measured = any(map(_is_measured, trials))
        if self._predictions and not measured:
            return dict(pool[int(np.argmin(predicted))])
        encoding = Coordinates(symbols)
        if not measured or not self._predictions and len(trials) < min(1 + len(symbols), LARGEST_SPREAD):
            return self._spread(encoding, pool, tried)
        surrogate, best = self.fit(encoding, trials)
        mean, deviation = surrogate.predict(pool, predicted)
        return dict(pool[int(np.argmax(expected_improvement(mean, deviation, best)))])

    def symbols(self, trials: Sequence[FrozenTrial]) -> list[SymbolDefinition]:
        """Return one definition for each symbol, with the candidates of all its definitions."""
        return merged_symbols([*self._declared, *(symbol for each in trials for symbol, _ in path_of(each))])

    def pool(self, symbols: Sequence[SymbolDefinition]) -> list[Mapping[str, Any]]:
        """Return configurations to compare: those of the space, in product with symbols that only schedules declare."""
        bases: Sequence[Mapping[str, Any]] = self._pool or [{}]
        declared = {symbol.name for symbol in self._declared}
        others = [symbol for symbol in symbols if symbol.name not in declared]
        if not declared and not others:
            return [each for each in self._predictions.configurations() if each]
        return self._products(bases, others)

    def fit(self, encoding: Coordinates, trials: Sequence[FrozenTrial]) -> tuple[Surrogate, float]:
        """Return the model of the trials, and the least logarithm of seconds among them.

        Running trials count as the model predicts them, so that another tuner's neighbourhood is left to it.
        """
        measured = [each for each in trials if _is_measured(each)]
        failed = [each for each in trials if each.state.is_finished() and not _is_measured(each)]
        running = [each for each in trials if each.state == TrialState.RUNNING]
        seconds = [-math.log(each.values[0]) for each in measured]
        known = measured + failed
        values = [values_of(each) for each in known]
        logs = np.array(seconds + [max(seconds) + FAILURE_PENALTY] * len(failed))
        surrogate = Surrogate(encoding, values, logs, self.log_predictions(values))
        if running:
            more = [values_of(each) for each in running]
            expected, _ = surrogate.predict(more, self.log_predictions(more))
            both = values + more
            surrogate = Surrogate(encoding, both, np.concatenate([logs, expected]), self.log_predictions(both))
        return surrogate, min(seconds)

    def log_predictions(self, configurations: Sequence[Mapping[str, Any]]) -> Array:
        """Return the logarithms of predicted seconds; a configuration without a prediction gets the median of the others."""
        found = [self._predictions.seconds(each) for each in configurations]
        known = [math.log(each) for each in found if each is not None]
        middle = float(np.median(known)) if known else 0.0
        return np.array([middle if each is None else math.log(each) for each in found])

    def _untried_pool(self, symbols: Sequence[SymbolDefinition], tried: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the configurations of the pool that were not tried and that the plan does not rule out."""
        taken = {configuration_key(each) for each in tried}
        left = [each for each in self.pool(symbols) if configuration_key(each) not in taken]
        return [each for each in left if not self._predictions.impossible(each)]

    def _products(self, bases: Sequence[Mapping[str, Any]], symbols: Sequence[SymbolDefinition]) -> list[Mapping[str, Any]]:
        """Return the products of configurations with the candidates of symbols: all of a small space, else random ones."""
        sizes = [len(bases), *(len(symbol.candidates) for symbol in symbols)]
        total = math.prod(sizes)
        places: Any = range(total)
        if total > POOL_SIZE:
            places = sorted({int(total * self._generator.random()) for _ in range(POOL_SIZE)})
        found: list[Mapping[str, Any]] = []
        for place in places:
            rest, index = divmod(place, len(bases))
            values = dict(bases[index])
            for symbol in symbols:
                rest, index = divmod(rest, len(symbol.candidates))
                values[symbol.name] = symbol.candidates[index]
            found.append(values)
        return found

    def _spread(
        self, encoding: Coordinates, pool: Sequence[Mapping[str, Any]], tried: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the configuration farthest from those tried; before the first, nothing: the defaults."""
        if not tried:
            return {}
        new, old = (np.concatenate(encoding.blocks(each), axis=1) for each in (pool, tried))
        nearest = ((new[:, None, :] - old[None, :, :]) ** 2).sum(axis=-1).min(axis=1)
        farthest = np.flatnonzero(nearest >= nearest.max() - 1e-9)
        return dict(pool[int(self._generator.choice(farthest))])


def merged_symbols(definitions: Sequence[SymbolDefinition]) -> list[SymbolDefinition]:
    """Return one definition for each name, with all candidates, in order where they are numbers."""
    values: dict[str, dict[str, Any]] = {}
    for symbol in definitions:
        values.setdefault(symbol.name, {}).update({value_key(value): value for value in symbol.candidates})
    merged = []
    for name, seen in values.items():
        numeric = all(type(value) in (int, float) for value in seen.values())
        merged.append(SymbolDefinition(name, "choice", tuple(sorted(seen.values()) if numeric else seen.values())))
    return merged


def _is_measured(trial: FrozenTrial) -> bool:
    """Return whether a trial has a throughput: one that was measured to the end, or until it was pruned."""
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and trial.values is not None


def _trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that the tuner added; the one that Optuna asks about is not among them."""
    return [each for each in study.get_trials(deepcopy=False) if "symbols" in each.user_attrs]
