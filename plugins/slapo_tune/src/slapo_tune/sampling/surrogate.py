"""Gaussian process of the logarithm of seconds over configurations, around a plan's predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schedule_space.schedule_space import SymbolDefinition

Array = NDArray[np.float64]

_DRAWS = 80
"""Settings of the kernel that are compared by their likelihood."""

_LEAST_SPREAD = 0.02
"""Least standard deviation of the logarithm of seconds, about 2 %."""

_UNKNOWN_SPREAD = 0.3
"""Standard deviation of the logarithm of seconds before two trials are known."""


class Coordinates:
    """Coordinates of configurations: one block of columns per symbol.

    Numbers lie between 0 and 1 in the order of the candidates, other candidates in a column each. A symbol that a configuration
    does not have is away from all its values.
    """

    def __init__(self, symbols: Sequence[SymbolDefinition]) -> None:
        self._symbols = symbols

    def blocks(self, configurations: Sequence[Mapping[str, Any]]) -> list[Array]:
        """Return an array ``(configurations, columns)`` for each symbol."""
        return [np.array([self._place(symbol, each) for each in configurations], dtype=float) for symbol in self._symbols]

    def _place(self, symbol: SymbolDefinition, values: Mapping[str, Any]) -> list[float]:
        index = symbol.index(values[symbol.name]) if symbol.name in values else -1
        numeric = all(type(value) in (int, float) for value in symbol.candidates)
        if numeric:
            return [index / max(1, len(symbol.candidates) - 1), 0.0] if index >= 0 else [0.5, 1.0]
        return [math.sqrt(0.5) * (place == index) for place in range(len(symbol.candidates))]


class Surrogate:
    """Model ``log(seconds) = log(predicted) + offset + slope * log(predicted) + deviation(configuration)``.

    Offset and slope, the plan's general error, and the deviations, its error on some layouts, have Gaussian priors. So one
    trial moves all predictions alike, and more trials tell layouts apart. Without predictions the deviation is everything.

    Args:
        encoding: Of the symbols.
        configurations: Those that were tried.
        seconds: Their logarithms of seconds.
        predicted: Logarithms of the plan's seconds, 0 where it has none.
    """

    def __init__(
        self,
        encoding: Coordinates,
        configurations: Sequence[Mapping[str, Any]],
        seconds: Array,
        predicted: Array,
        seed: int = 0,
    ) -> None:
        self._blocks, self._encoding, self._predicted = encoding.blocks(configurations), encoding, predicted
        residual = seconds - predicted
        self._center = float(np.median(residual))
        spread = float(np.std(residual)) if len(residual) > 1 else _UNKNOWN_SPREAD
        self._scale = max(spread, _LEAST_SPREAD if len(residual) > 2 else _UNKNOWN_SPREAD)
        self._target = (residual - self._center) / self._scale
        self._slope_center = float(predicted.mean())
        self._distances = [_squared_distances(block, block) for block in self._blocks]
        self._fit(np.random.default_rng(seed))

    def _fit(self, generator: np.random.Generator) -> None:
        """Choose length scales, amplitude and noise by their likelihood, times a prior for smooth functions."""
        best = -math.inf
        for draw in range(_DRAWS):
            lengths = np.exp(generator.normal(math.log(0.8), 0.9 if draw else 0.0, len(self._blocks)))
            amplitude = math.exp(generator.normal(0.0, 0.4 if draw else 0.0))
            noise = 10.0 ** generator.uniform(-4, -1) if draw else 1e-2
            covariance = self._covariance(self._distances, lengths, amplitude) + self._linear(self._predicted, self._predicted)
            factor = np.linalg.cholesky(covariance + noise * np.eye(len(self._target)))
            white = np.linalg.solve(factor, self._target)
            prior = -0.5 * float(np.sum((np.log(lengths) - math.log(0.8)) ** 2)) / 0.9**2
            likelihood = -0.5 * float(white @ white) - float(np.sum(np.log(np.diag(factor)))) + 0.5 * prior
            if likelihood > best:
                best, self._lengths, self._amplitude, self._factor, self._white = likelihood, lengths, amplitude, factor, white

    def predict(self, configurations: Sequence[Mapping[str, Any]], predicted: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation of the logarithm of seconds of configurations."""
        distances = [
            _squared_distances(new, old) for new, old in zip(self._encoding.blocks(configurations), self._blocks, strict=True)
        ]
        cross = self._covariance(distances, self._lengths, self._amplitude) + self._linear(predicted, self._predicted)
        solved = np.linalg.solve(self._factor, cross.T)
        mean = solved.T @ self._white
        own = self._amplitude + np.diag(self._linear(predicted, predicted))
        variance = np.maximum(own - np.sum(solved**2, axis=0), 1e-9)
        return predicted + self._center + self._scale * mean, self._scale * np.sqrt(variance)

    def _linear(self, left: Array, right: Array) -> Array:
        """Return the covariance of offset and slope."""
        slope = 0.3 / self._scale
        return 1.0 + np.outer(slope * (left - self._slope_center), slope * (right - self._slope_center))

    @staticmethod
    def _covariance(distances: Sequence[Array], lengths: Array, amplitude: float) -> Array:
        """Matern 5/2 covariance with a length scale for each symbol."""
        root = np.sqrt(5.0 * sum(each / length**2 for each, length in zip(distances, lengths, strict=True)) + 1e-12)
        found: Array = amplitude * (1.0 + root + root**2 / 3.0) * np.exp(-root)
        return found


def _squared_distances(left: Array, right: Array) -> Array:
    found: Array = ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=-1)
    return found


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """Return the expected decrease below ``best`` of normal variables."""
    z = (best - mean) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi)
    below = 0.5 * (1.0 + np.vectorize(math.erf)(z / math.sqrt(2.0)))
    found: Array = deviation * (z * below + density)
    return found


def importances(
    surrogate: Surrogate, symbols: Sequence[SymbolDefinition], pool: Sequence[Mapping[str, Any]], predicted: Array
) -> dict[str, float]:
    """Return the share of each symbol in the variation of predicted seconds over a pool; the shares add up to 1.

    The share is the variance of the means over the values of the symbol, its main effect, among the configurations that have
    the symbol.
    """
    mean, _ = surrogate.predict(pool, predicted)
    effects = {}
    for symbol in symbols:
        groups = np.array([symbol.index(each[symbol.name]) if symbol.name in each else -1 for each in pool])
        own = mean[groups >= 0]
        sizes = [(mean[groups == group].mean() - own.mean(), np.sum(groups == group)) for group in set(groups.tolist()) - {-1}]
        effects[symbol.name] = float(sum(count * distance**2 for distance, count in sizes)) / len(pool)
    total = sum(effects.values())
    return {name: effect / total if total else 0.0 for name, effect in sorted(effects.items(), key=lambda item: -item[1])}
