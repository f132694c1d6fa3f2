"""Result of one trial, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..search_space.space import Space

MEASURED, FAILED, REFUSED, PRUNED = "measured", "failed", "refused", "pruned"
"""States: with a throughput; ended by an error; refused before any process was started; stopped as slower than the best."""


@dataclass(frozen=True)
class TrialResult:
    """Result of one trial.

    Args:
        number: Its number in the study, from 0.
        values: Value of each symbol, in the order of declaration.
        state: ``"measured"``, ``"failed"``, ``"refused"`` or ``"pruned"``.
        throughput: Samples a second; None without a measurement.
        seconds: Seconds of a training step; None if unknown.
        interval: 95 % interval of ``throughput``; None if it was measured once.
        steps: Training steps that were measured.
        predicted: Seconds of a step, as the plan predicts them; None without a plan.
        message: Sentence about a trial without a throughput, or about one that was not verified.
        wall_seconds: Seconds of the whole trial, start included.
        time_limit: Time limit in seconds that ended the trial; None otherwise.
        verified: Whether the schedule computes the same as the unmodified model; None if that was not asked.
    """

    number: int
    values: Mapping[str, Any]
    state: str
    throughput: float | None = None
    seconds: float | None = None
    interval: tuple[float, float] | None = None
    steps: int = 0
    predicted: float | None = None
    message: str = ""
    wall_seconds: float = 0.0
    time_limit: float | None = None
    verified: bool | None = None
    output: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the line of JSON that the trial printed."""

    @property
    def is_measured(self) -> bool:
        """True if the trial has a throughput that counts: one that was not refuted by the verification."""
        return self.state == MEASURED and self.verified is not False

    def data(self) -> dict[str, Any]:
        """Return everything but number and values, for the storage."""
        return {name: value for name, value in asdict(self).items() if name not in ("number", "values")}

    @classmethod
    def of_data(cls, number: int, values: Mapping[str, Any], data: Mapping[str, Any]) -> TrialResult:
        """Return the result whose ``data`` the storage holds."""
        known = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        if known.get("interval") is not None:
            known["interval"] = tuple(known["interval"])
        return cls(number, dict(values), **known)

    def classic_record(self, command: str) -> dict[str, Any]:
        """Return the record of the classic database."""
        return {
            "config": dict(self.values),
            "throughput": self.throughput if self.is_measured else None,
            "error": None if self.is_measured else self.message or self.state,
            "seconds": round(self.wall_seconds, 3),
            "time_limit": self.time_limit,
            "command": command,
            "result": {"seconds": self.seconds, "interval": self.interval, **self.output} if self.is_measured else None,
        }

    def __str__(self) -> str:
        return f"{Space.cfg_dict_to_str(self.values)}: {self.outcome}"

    @property
    def outcome(self) -> str:
        """The throughput with its interval, or the sentence about the failure."""
        if self.throughput is None or not self.is_measured:
            return self.message or self.state
        spread = ""
        if self.interval is not None:
            half = (self.interval[1] - self.interval[0]) / 2 / self.throughput
            spread = f" ± {100 * half:.1f} %"
        return f"{self.throughput:.5g} samples/s{spread}"
