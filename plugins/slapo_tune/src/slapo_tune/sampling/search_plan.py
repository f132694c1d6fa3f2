"""Interface of a planner, and its predictions for the configurations of a space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..schedule_space.schedule_space import configuration_key, value_key
from ..search_space.symbol import TuneError


class PlannedCandidate(Protocol):
    """One layout of a plan."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Values by name, such as ``{"tp": 2, "pp": 1, "microbatches": 4}``."""

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a training step."""


class SearchPlan(Protocol):
    """Predictions of a planner, such as ``slapo_plan.Plan``.

    The names of settings that are symbols of the space count; others are the planner's own choice. A plan may also have

    - ``impossible(settings) -> str``: the sentence that says why settings cannot work, ``""`` where they may;
    - ``rejected``: what it rules out. An element with ``settings`` rules out every configuration that has all of them, with the
      element's text as the sentence.
    """

    @property
    def candidates(self) -> Sequence[PlannedCandidate]:
        """The possible layouts in the order of predicted time."""


class Predictions:
    """Predicted seconds and proofs of impossibility for configurations.

    Args:
        plan: The plan; None predicts nothing.

    Raises:
        TuneError: it has no candidates with ``settings`` and ``step_seconds``.
    """

    def __init__(self, plan: SearchPlan | None) -> None:
        self._plan = plan
        self._judged: dict[str, str] = {}
        self._known: dict[str, float | None] = {}
        self._candidates = [] if plan is None else [_read_candidate(each) for each in _candidates(plan)]
        self._rejected = [
            ({name: value_key(value) for name, value in found.items()}, str(each))
            for each in getattr(plan, "rejected", ())
            if isinstance(found := getattr(each, "settings", None), Mapping)
        ]

    def __bool__(self) -> bool:
        return bool(self._candidates)

    def seconds(self, values: Mapping[str, Any]) -> float | None:
        """Return the least predicted seconds of the candidates that have these values; None if there is none."""
        key = configuration_key(values)
        if key not in self._known:
            self._known[key] = self._predict(values)
        return self._known[key]

    def _predict(self, values: Mapping[str, Any]) -> float | None:
        keys = {name: value_key(value) for name, value in values.items()}
        known = [
            seconds
            for settings, _, seconds in self._candidates
            if (shared := settings.keys() & keys.keys()) and all(settings[name] == keys[name] for name in shared)
        ]
        return min(known, default=None)

    def impossible(self, values: Mapping[str, Any]) -> str:
        """Return the plan's sentence on why a configuration cannot work, or ``""``."""
        key = configuration_key(values)
        if key not in self._judged:
            self._judged[key] = self._judge(values)
        return self._judged[key]

    def _judge(self, values: Mapping[str, Any]) -> str:
        if callable(judge := getattr(self._plan, "impossible", None)):
            return str(judge(dict(values)) or "")
        keys = {name: value_key(value) for name, value in values.items()}
        return next((said for settings, said in self._rejected if settings and settings.items() <= keys.items()), "")

    def configurations(self) -> list[dict[str, Any]]:
        """Return the settings of the candidates in the order of the plan."""
        return [dict(values) for _, values, _ in self._candidates]


def _candidates(plan: Any) -> Sequence[Any]:
    found = getattr(plan, "candidates", None)
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise TuneError(f"prune: {type(plan).__name__} has no list of candidates; give what slapo.plan returned")
    return found


def _read_candidate(candidate: Any) -> tuple[dict[str, str], Mapping[str, Any], float]:
    settings, seconds = getattr(candidate, "settings", None), getattr(candidate, "step_seconds", None)
    if not isinstance(settings, Mapping) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise TuneError(f"prune: a candidate has settings {settings!r} and step_seconds {seconds!r}; give a dict and a number")
    return {name: value_key(value) for name, value in settings.items() if _is_plain(value)}, settings, float(seconds)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (type(None), bool, int, float, str))
