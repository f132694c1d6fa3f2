"""A subject whose seconds are a function of the values, for searches that start no process."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slapo_tune import ScheduleSpace, TrialResult
from slapo_tune.study.trial_result import FAILED, MEASURED, PRUNED
from slapo_tune.trial.process import Interruption
from slapo_tune.trial.reports import Prune, TrialReport

Seconds = Callable[[Mapping[str, Any]], float]


def layouts(space: ScheduleSpace) -> None:
    """Declare 2 x 4 x 9 + 2 x 2 x 9 configurations, those of ``fsdp`` with an own symbol."""
    kind = space.choice("kind", ["ddp", "fsdp", "tensor"])
    space.choice("microbatches", [1, 2, 4, 8] if kind != "tensor" else [1, 2])
    if kind == "fsdp":
        space.choice("reshard", [True, False])
    space.int("checkpointed", 0, 8)


def layout_seconds(values: Mapping[str, Any]) -> float:
    """Return seconds with one best configuration."""
    seconds = {"ddp": 1.0, "fsdp": 0.8, "tensor": 1.3}[values["kind"]]
    seconds *= 1 + 0.1 * abs(math.log2(values["microbatches"]) - 2) + 0.05 * values["checkpointed"]
    return seconds * (1.0 if values.get("reshard", True) else 0.95)


class FunctionSubject:
    """A subject whose trials are calls of a function.

    Args:
        space: Declares the symbols.
        seconds: Seconds of a step; an exception is a failure.
        refusals: Returns the sentence of a refusal.
        wrong: Returns what the verification says.
        steps: Steps after which a trial reports its throughput, the same after each, known within 1 %.
        declares: Whether the space is known without a model.
    """

    name = command = "function"

    def __init__(
        self,
        space: Callable[[ScheduleSpace], Any] = layouts,
        seconds: Seconds = layout_seconds,
        refusals: Callable[[Mapping[str, Any]], str] = lambda values: "",
        wrong: Callable[[Mapping[str, Any]], str | None] = lambda values: "",
        declares: bool = True,
        steps: Sequence[int] = (),
    ) -> None:
        self._space, self._seconds, self._refusals, self._wrong = space, seconds, refusals, wrong
        self.space_function = space if declares else None
        self.measured: list[dict[str, Any]] = []
        self.interrupt_after = math.inf
        self._steps = steps

    def declare(self, space: ScheduleSpace) -> str:
        self._space(space)
        return self._refusals(space)

    def measure(self, number: int, values: Mapping[str, Any], prune: Prune, interruption: Interruption) -> TrialResult | None:
        if len(self.measured) >= self.interrupt_after:
            signal.raise_signal(signal.SIGINT)
            return None
        self.measured.append(dict(values))
        try:
            seconds = self._seconds(values)
        except Exception as err:
            return TrialResult(number, dict(values), FAILED, message=str(err))
        throughput = 8 / seconds
        for step in self._steps:
            if sentence := prune(TrialReport(step, throughput, (0.99 * throughput, 1.01 * throughput))):
                return TrialResult(number, dict(values), PRUNED, throughput, seconds, steps=step, message=sentence)
        return TrialResult(number, dict(values), MEASURED, throughput, seconds, steps=max(self._steps, default=0))

    def verify(self, values: Mapping[str, Any], interruption: Interruption) -> str | None:
        return self._wrong(values)
