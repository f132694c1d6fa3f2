"""The classic tuner: it runs the training script with every configuration of a space, and stores the results."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .configuration import CHECKPOINT_RATIO, Configuration
from .search_space.space import Space, Traversal
from .search_space.symbol import TuneError
from .study.database import Database, json_data
from .trial.process import Interruption, TrialOutput, check_variables, run_trial, signal_name
from .trial.script_arguments import ScriptArguments, substitute, uses_symbol
from .trial.throughput import error_tail, invalid_throughput, logged_result, printed_result

ErrorStop = Literal["none", "symbol", "all"]


@dataclass(frozen=True)
class Settings:
    """Settings of a tuner.

    Args:
        program: Program and arguments that start the script, before its own.
        arguments: Arguments of the script, with the names of symbols in the places of their values.
        timeout: Seconds a trial may take; None for any.
        error_stop: After a trial that failed: go on, leave out the later values of the innermost symbol, or end.
    """

    program: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    configuration: Configuration
    timeout: float | None
    error_stop: ErrorStop


@dataclass
class Results:
    """The trials so far.

    Args:
        total: Configurations in the space.
        records: Configuration, as text, to the record of its trial, of this run and of earlier ones.
        stopped: Whether ``--error-stop all`` ended the run.
    """

    total: int
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped: bool = False

    @property
    def best(self) -> tuple[str, float] | None:
        """The configuration with the highest throughput, and this throughput."""
        found = {name: record["throughput"] for name, record in self.records.items() if record["error"] is None}
        return max(found.items(), key=lambda item: item[1]) if found else None


class Tuner:
    """Runner of the trials of a space, one after the other; those with a result in the database do not run again.

    ``interruption`` ends the run before the next trial, and a running trial.
    """

    def __init__(self, settings: Settings, database: Database, interruption: Interruption) -> None:
        self._settings, self._database, self._interruption = settings, database, interruption
        self._traversal = self._checked_traversal()
        self.results = Results(sum(1 for _ in self._traversal))

    def _checked_traversal(self) -> Traversal:
        """Return the traversal of the space, after a check of all configurations: errors come before the first trial."""
        settings = self._settings
        args = ScriptArguments(settings.arguments)
        space = settings.configuration.initial_space(args, uses_symbol(settings.arguments, CHECKPOINT_RATIO))
        traversal = Traversal(space, args, settings.configuration.update)
        for values in traversal:
            if not values:
                raise TuneError(f"config({settings.configuration.path!r}): update_space creates no symbol; create one")
            check_variables(values)
            json_data(values, "update_space")
        return traversal

    def run(self) -> Results:
        """Run the trials that the database does not have, and return all results."""
        for number, values in enumerate(self._traversal, 1):
            with self._interruption.defer_signals():  # no result of a trial is lost
                record = self._take(number, values)
            if record is None or self._interruption.number is not None:
                break
            if record["error"] is not None and self._settings.error_stop == "all":
                self.results.stopped = True
                break
            if record["error"] is not None and self._settings.error_stop == "symbol":
                self._traversal.skip_rest()
        return self.results

    def _take(self, number: int, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the record of a configuration, from the database or of a trial now; None after an interruption."""
        name = Space.cfg_dict_to_str(values)
        origin, record = "from the database, ", self._find_record(name)
        if record is None:
            origin, record = "", self._run(values)
            if record is None:
                return None
            self._database.commit(self._key(name), record)
        self.results.records[name] = record
        outcome = record["error"] or f"{record['throughput']:.5g} samples/s in {record['seconds']:.1f} s"
        news = f"tune: trial {number}/{self.results.total} {name}: {origin}{outcome}"
        print(news, file=sys.stderr, flush=True)
        return record

    def _key(self, name: str) -> str:
        """Return the database's key: the command with the symbols' names in it, and their values."""
        return f"{shlex.join([self._settings.script, *self._settings.arguments])} {name}"

    def _find_record(self, name: str) -> dict[str, Any] | None:
        """Return the record of a finished trial, or None; reads the file again, as another tuner may have added to it."""
        self._database.load()
        record = self._database.db.get(self._key(name))
        if not isinstance(record, dict) or not _is_record(record):
            return None
        limit, now = record["time_limit"], self._settings.timeout
        more_time = limit is not None and (now is None or now > limit)
        return None if more_time else record

    def _run(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
        settings = self._settings
        arguments = [substitute(argument, values) for argument in settings.arguments]
        try:
            output = run_trial([*settings.program, *arguments], values, settings.timeout, self._interruption)
        except (OSError, ValueError) as err:
            raise TuneError(f"tune({settings.script!r}): the script cannot be started: {err}; give one that can") from err
        return None if output is None else self._record(output, arguments, values)

    def _record(self, output: TrialOutput, arguments: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
        stdout = output.stdout.splitlines()
        result = printed_result(stdout) or logged_result([*stdout, *output.stderr.splitlines()], values)
        error = self._error(output, result)
        return {
            "config": dict(values),
            "throughput": None if error else (result or {}).get("throughput"),
            "error": error,
            "seconds": round(output.seconds, 3),
            "time_limit": self._settings.timeout if output.timed_out else None,
            "command": shlex.join([self._settings.script, *arguments]),
            "result": None if error else result,
        }

    def _error(self, output: TrialOutput, result: Mapping[str, Any] | None) -> str | None:
        """Return the sentence about a trial that gave no throughput, with the end of its output."""
        if output.timed_out:
            problem = f"was killed at the time limit of {self._settings.timeout:g} s"
        elif output.exit_code:
            code = output.exit_code
            problem = f"ended with exit code {code}" if code > 0 else f"ended by {signal_name(-code)}"
        elif result is None:
            problem = f"printed no throughput, as in {json.dumps({'throughput': 12.5})}"
        elif reason := invalid_throughput(result["throughput"]):
            problem = f"printed what cannot be compared: {reason}"
        else:
            return None
        words = error_tail(output.text)
        said = f"the end of its output: {words}" if words else "it printed nothing"
        return f"{Path(self._settings.script).name} {problem}; {said}"


def _is_record(found: Mapping[str, Any]) -> bool:
    """Return whether an entry of the database has the form of a trial's record, rather than one written by hand."""
    if not found.keys() >= {"throughput", "error", "seconds", "time_limit"}:
        return False
    numbers = [found["seconds"], *([] if found["time_limit"] is None else [found["time_limit"]])]
    outcome = isinstance(found["error"], str) if found["error"] is not None else not invalid_throughput(found["throughput"])
    return outcome and all(isinstance(number, (int, float)) for number in numbers)
