"""Result of a tuning: trials, the best of them, failures, and importances; as text, data, page or schedule file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slapo_report import tune_page

from .search_space.space import Space
from .search_space.symbol import TuneError
from .study.trial_result import PRUNED, REFUSED, TrialResult

WriteSchedule = Callable[[Mapping[str, Any], Path], object]
"""Writes the schedule of a configuration as a Python schedule file that runs with these values."""


@dataclass(frozen=True)
class TuneResult:
    """Result of ``slapo.tune``.

    Args:
        name: Name of the study.
        trials: Results of all tuners that share the study, in order of number.
        best: The fastest trial, verified unless that was turned off or cannot be done; None if none has a throughput.
        skipped: Values that the plan rules out, with its sentence.
        importances: Share of each symbol in the variation of the seconds of a step; empty with fewer than three trials.
        space: Candidates of each symbol.
        budget: Trials, and the limits in seconds.
        interrupted: Signal that ended the search, or 0.
        verification_problem: Sentence on why the verification of the best had no verdict, or ``""``.
    """

    name: str
    trials: tuple[TrialResult, ...]
    best: TrialResult | None
    skipped: tuple[tuple[Mapping[str, Any], str], ...] = ()
    importances: Mapping[str, float] = field(default_factory=dict)
    space: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    budget: Mapping[str, Any] = field(default_factory=dict)
    interrupted: int = 0
    verification_problem: str = ""
    write_schedule: WriteSchedule | None = field(default=None, repr=False, compare=False)

    @property
    def failures(self) -> tuple[TrialResult, ...]:
        """Trials that failed, were refused, or compute something else than the model; each has a ``message``."""
        return tuple(trial for trial in self.trials if trial.throughput is None or trial.verified is False)

    @property
    def best_so_far(self) -> list[float | None]:
        """The highest throughput until each trial, in order."""
        found: list[float | None] = []
        best: float | None = None
        for trial in self.trials:
            if trial.is_measured and trial.throughput is not None:
                best = max(best or 0.0, trial.throughput)
            found.append(best)
        return found

    def save(self, path: str | os.PathLike[str], model: Mapping[str, Any] | None = None) -> None:
        """Write the best as a schedule file, for ``slapo train --schedule`` and ``slapo.load_schedule``.

        For a schedule file it is this file with ``best``, other values; for a function or a plan the steps it took.

        Args:
            path: The file.
            model: Flags of ``slapo train`` for the model and its batch, written as ``model = {...}``.

        Raises:
            TuneError: there is no best, the file does not end in ``.py`` or cannot be written.
            ScheduleError: a step of a schedule that is a function has no written form.
        """
        target = Path(path)
        if self.best is None:
            raise TuneError("save: no trial has a throughput, so there is no best schedule; see result.failures")
        if target.suffix != ".py":
            raise TuneError(f"save({str(target)!r}): a schedule file is Python; end its name in .py")
        if self.write_schedule is None:
            raise TuneError("save: this tuning has no schedule file")
        unfinished = target.with_name(f".{target.stem}.unfinished.py")
        try:
            self.write_schedule(self.best.values, unfinished)
            said = "" if self.best.verified else ", not verified"
            with open(unfinished, "a", encoding="utf-8") as file:
                file.write(f"\nmodel = {dict(model)!r}" if model else "")
                file.write(f"\n# trial {self.best.number} of {self.name}: {self.best.outcome}{said}\n")
            os.replace(unfinished, target)
        except OSError as err:
            raise TuneError(f"save({str(target)!r}): it cannot be written: {err}; choose another file") from err
        finally:
            unfinished.unlink(missing_ok=True)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a page with trials, best so far, and importances.

        Raises:
            TuneError: the file cannot be written.
        """
        try:
            Path(path).write_text(tune_page(self.to_dict()), encoding="utf-8")
        except OSError as err:
            raise TuneError(f"report({os.fspath(path)!r}): it cannot be written: {err}; choose another file") from err

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, the input of the page."""
        return {
            "title": self.name,
            "space": {name: list(candidates) for name, candidates in self.space.items()},
            "trials": [
                {"number": each.number, "values": dict(each.values), "verified": each.verified}
                | {name: value for name, value in each.data().items() if name not in ("verified", "output")}
                for each in self.trials
            ],
            "best": self.best.number if self.best else None,
            "best_so_far": self.best_so_far,
            "importances": dict(self.importances),
            "failures": ([f"the best could not be verified: {self.verification_problem}"] if self.verification_problem else [])
            + [str(each) for each in self.failures]
            + [f"{Space.cfg_dict_to_str(values)}: skipped: {sentence}" for values, sentence in self.skipped],
            "budget": dict(self.budget),
        }

    def __str__(self) -> str:
        counted = [each for each in self.trials if each.state != REFUSED]
        stopped = sum(each.state == PRUNED for each in counted)
        told = f"{stopped} of them stopped as slow, " if stopped else ""
        parts = f"{len(counted)} trials, {told}{len(self.failures)} failures, {len(self.skipped)} skipped"
        lines = [f"{self.name}: {parts}"]
        if self.best is not None:
            word = {True: "verified", False: "refuted", None: "not verified"}[self.best.verified]
            lines.append(f"best: {self.best}, {word}" + (f": {self.verification_problem}" if self.verification_problem else ""))
        if self.importances:
            shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in self.importances.items())
            lines.append(f"importance: {shares}")
        return "\n".join(lines)
