"""A training script as the subject of a tuning: the space stands in a schedule file, which the script loads."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..schedule_space.schedule_file import VARIABLE, declare, read_schedule_file
from ..schedule_space.schedule_space import ScheduleSpace
from ..search_space.symbol import TuneError
from ..study.trial_result import TrialResult
from ..trial.process import Interruption, check_variables, run_trial
from ..trial.reports import Prune, ReportReader
from ..trial.script_arguments import substitute
from ..trial.throughput import logged_result, printed_result
from .subject import trial_result


class ScriptSubject:
    """A script that trains and prints its throughput, run with the values of each configuration.

    It gets them as arguments and in the environment, as from the classic tuner. ``slapo.load_schedule`` in it runs the schedule
    file with them.

    Args:
        program: Program and arguments that start the script, before its own.
        script: Path of the script.
        arguments: Its arguments, with names of symbols in the places of values.
        schedule: Path of the schedule file, which declares the space.
        timeout: Seconds of a trial; None for any.

    Raises:
        TuneError: the schedule file does not declare its symbols in ``space(space)``.
    """

    def __init__(
        self, program: Sequence[str], script: str, arguments: Sequence[str], schedule: str, timeout: float | None
    ) -> None:
        namespace = read_schedule_file(schedule)
        if "space" not in namespace:
            raise TuneError(
                f"schedule({schedule!r}): it defines no space(space), and a script's model is not known to the tuner; declare "
                "the symbols there"
            )
        self._program, self._script, self._arguments, self._timeout = [*program], script, [*arguments], timeout
        self.command = shlex.join([script, *arguments])
        self.name = f"{self.command} with {os.path.basename(schedule)}"
        self.space_function = partial(declare, namespace["space"])

    def declare(self, space: ScheduleSpace) -> str:
        """Declare all symbols of a configuration; nothing is refused before the script runs."""
        self.space_function(space)
        check_variables(space)
        return ""

    def measure(self, number: int, values: Mapping[str, Any], prune: Prune, interruption: Interruption) -> TrialResult | None:
        """Run the script; None after an interruption."""
        command = [*self._program, *(substitute(argument, values) for argument in self._arguments)]
        more = {VARIABLE: json.dumps(dict(values))}
        reports = ReportReader(prune)
        try:
            output = run_trial(command, values, self._timeout, interruption, more, reports)
        except (OSError, ValueError) as err:
            raise TuneError(f"tune({self._script!r}): the script cannot be started: {err}; give one that can") from err
        if output is None:
            return None
        lines = output.stdout.splitlines()
        found = printed_result(lines) or logged_result([*lines, *output.stderr.splitlines()], values)
        return trial_result(number, values, output, found, self._timeout, Path(self._script).name, reports)

    def verify(self, values: Mapping[str, Any], interruption: Interruption) -> str | None:
        """Return None: the script's model is not known."""
        return None
