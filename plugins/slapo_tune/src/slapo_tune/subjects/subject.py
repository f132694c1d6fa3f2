"""Interface of what is tuned, and the reading of a trial's output."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..schedule_space.schedule_file import SpaceFunction
from ..schedule_space.schedule_space import ScheduleSpace
from ..search_space.symbol import TuneError
from ..study.trial_result import FAILED, MEASURED, PRUNED, TrialResult
from ..trial.process import Interruption, TrialOutput, signal_name
from ..trial.reports import Prune, ReportReader, interval_of
from ..trial.temporary_files import full_disk, is_full, temporary_folder
from ..trial.throughput import error_tail, invalid_throughput

SILENT_END = "was ended by exit code"
"""End of the error of a rank that left no words, in front of the code."""


class UnfinishedVerificationError(TuneError):
    """A verification that ended without a verdict, e.g. for want of time or memory: the configuration may be right."""


class Subject(Protocol):
    """Schedule or script whose configurations are tried.

    Args:
        name: Name of the study: equal for equal subjects.
        command: How a user would run it, for the classic record.
    """

    name: str
    command: str

    @property
    def space_function(self) -> SpaceFunction | None:
        """The function that declares symbols without a model; None if there is none."""

    def declare(self, space: ScheduleSpace) -> str:
        """Declare all symbols of a configuration; return the sentence of a refusal, or ``""``."""

    def measure(self, number: int, values: Mapping[str, Any], prune: Prune, interruption: Interruption) -> TrialResult | None:
        """Run a trial, and stop it where ``prune`` says so; None after an interruption."""

    def verify(self, values: Mapping[str, Any], interruption: Interruption) -> str | None:
        """Return the sentence about what is wrong, ``""`` if the configuration is right, None if it cannot be asked.

        Raises:
            UnfinishedVerificationError: there is no verdict; says why.
        """


def output_problem(output: TrialOutput, time_limit: float | None, what: str) -> str:
    """Return the sentence about a trial that did not end well, without its own words; ``""`` if it did."""
    if output.timed_out:
        return f"{what} was killed at the time limit of {time_limit:g} s"
    if output.exit_code:
        code = output.exit_code
        return f"{what} ended with exit code {code}" if code > 0 else f"{what} ended by {signal_name(-code)}"
    return ""


def trial_result(
    number: int,
    values: Mapping[str, Any],
    output: TrialOutput,
    found: Mapping[str, Any] | None,
    time_limit: float | None,
    what: str,
    reports: ReportReader,
) -> TrialResult:
    """Return the result of a trial from its output.

    Args:
        number: Number of the trial.
        values: Its configuration.
        output: Output and end of its process.
        found: The line of JSON with its throughput, if there is one.
        time_limit: Seconds that it had.
        what: What ran, for sentences.
        reports: Its reports; the one that stopped it is its result.

    Raises:
        TuneError: the trial failed, and the disk of temporary files is full.
    """
    pruned = reports.last is not None
    if reports.last is not None:
        found = reports.last.line
    problem = "" if pruned else output_problem(output, time_limit, what)
    if not problem and found is None:
        problem = f"{what} printed no throughput, as in {json.dumps({'throughput': 12.5})}"
    elif not problem and found is not None and (reason := invalid_throughput(found["throughput"])):
        problem = f"{what} printed what cannot be compared: {reason}"
    limit = time_limit if output.timed_out else None
    if problem:
        if is_full(temporary_folder()):  # not the fault of this configuration
            raise full_disk()
        own = own_error(output)
        words = error_tail(output.text)
        said = own or f"{problem}; " + (f"the end of its output: {words}" if words else "it printed nothing")
        return TrialResult(number, values, FAILED, message=said, wall_seconds=round(output.seconds, 3), time_limit=limit)
    assert found is not None
    taken = {"throughput", "interval", "seconds", "step", "steps", "samples_per_second"}
    return TrialResult(
        number,
        values,
        PRUNED if pruned else MEASURED,
        throughput=float(found["throughput"]),
        seconds=_number(found.get("seconds")),
        interval=interval_of(found.get("interval")),
        steps=int(_number(found.get("steps", found.get("step"))) or 0),
        message=reports.sentence,
        wall_seconds=round(output.seconds, 3),
        output={name: value for name, value in found.items() if name not in taken},
    )


def printed_error(text: str) -> str:
    """Return the ``error`` of the last line of JSON that has one, or ``""``."""
    return str((last_line(text, lambda found: isinstance(found.get("error"), str)) or {}).get("error", ""))


def own_error(output: TrialOutput) -> str:
    """Return the error that a trial printed, or ``""``; with the end of its output if a rank left no words of its own."""
    error = printed_error(output.stdout)
    words = error_tail(output.stderr)
    return f"{error}; the end of its output: {words}" if error.rpartition(" ")[0].endswith(SILENT_END) and words else error


def last_line(text: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """Return the last line that is a JSON object of a kind, or None."""
    for line in reversed(text.splitlines()):
        if not line.startswith("{"):
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and wanted(found):
            return found
    return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
