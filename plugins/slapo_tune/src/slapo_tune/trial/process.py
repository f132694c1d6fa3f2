"""One run of the training script in a process of its own: its environment, signals, and the end of all that it started."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from slapo_core import get_logger

from ..search_space.symbol import TuneError
from . import process_cleanup
from .reports import ReportReader
from .temporary_files import temporary_file_errors

TERMINATION_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]


class Interruption:
    """Takes the signals that want the program to end, in a ``with`` block, and notes the first as ``number``.

    A signal raises ``KeyboardInterrupt``, except inside :meth:`deferred`, where it is only noted.

    A signal that is ignored, as under ``nohup``, stays so. Outside of the main thread nothing is noted, as Python handles
    signals there alone.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}
        self._deferred = False

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            numbers = [number for number in TERMINATION_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def defer_signals(self) -> Iterator[None]:
        """Only note signals in a block, which looks at ``number`` itself."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if not self._deferred:
            raise KeyboardInterrupt


def signal_name(number: int) -> str:
    """Return a signal's name, e.g. ``"SIGINT"``."""
    try:
        return signal.Signals(number).name
    except ValueError:  # one of those that have no name of their own
        return f"signal {number}"


MARK = "SLAPO_TUNE_TRIAL"
"""The variable by which the processes of a trial are found, whatever session they are in."""


def trial_environment(values: Mapping[str, Any], mark: str) -> dict[str, str]:
    """Return this process's environment with each symbol in it, ``batch_size`` as ``SLAPO_TUNE_BATCH_SIZE``, ``BATCH_SIZE`` and
    ``batch_size``.

    Args:
        values: Values of the symbols.
        mark: Value of ``SLAPO_TUNE_TRIAL``, a name of the trial that no other has.
    """
    given = {variable: str(value) for name, value in values.items() for variable in variables(name)}
    return {"PYTHONUNBUFFERED": "1", **os.environ, **given, MARK: mark}


def variables(name: str) -> tuple[str, str, str]:
    """Return the names of the environment variables of a symbol."""
    bare = re.sub(r"\W", "_", name)
    return f"SLAPO_TUNE_{bare.upper()}", bare.upper(), bare


def check_variables(values: Mapping[str, Any]) -> None:
    """Refuse symbols that the environment of a trial cannot hold.

    Raises:
        TuneError: the variable of a symbol is one that this process has already, as ``PATH``, the tuner's own, or that of
            another symbol; or a value is one that no variable can have.
    """
    owners: dict[str, str] = {}
    for name, value in values.items():
        for variable in dict.fromkeys(variables(name)):
            if variable in os.environ or variable == MARK:
                raise TuneError(
                    f"symbol({name!r}): the environment has a variable {variable!r} already, by which a trial would get the "
                    "value; rename the symbol, or unset the variable"
                )
            if owners.setdefault(variable, name) != name:
                raise TuneError(
                    f"symbol({name!r}): its variable {variable!r} is that of {owners[variable]!r} too; rename one of them"
                )
        try:
            unusable = b"\0" in os.fsencode(str(value))
        except UnicodeEncodeError:
            unusable = True
        if unusable:
            raise TuneError(f"symbol({name!r}): neither arguments nor the environment of a program can hold {str(value)!r}")


def script_program(script: str) -> tuple[str, ...]:
    """Return what starts a script: Python's are started by this Python, other programs by themselves.

    Raises:
        TuneError: there is no such file or program.
    """
    if Path(script).is_file():
        runs_alone = not script.endswith(".py") and os.access(script, os.X_OK)
        return (os.path.abspath(script),) if runs_alone else (sys.executable, script)
    if os.sep not in script and (found := shutil.which(script)):
        return (found,)
    raise TuneError(f"tune({script!r}): no such file or program; give the training script behind the tuner's own flags")


POLL_SECONDS = 0.05

OUTPUT_BYTES = 16 * 2**20
"""Bytes that are read from the end of a trial's output."""


@dataclass(frozen=True)
class TrialOutput:
    """Output and end of a trial.

    Args:
        stdout: The end of its output.
        stderr: The end of its errors.
        exit_code: Exit code of its first process; None if the tuner killed it, at the time limit or as its reports are slow.
        timed_out: Whether it was killed at the time limit.
    """

    stdout: str
    stderr: str
    seconds: float
    exit_code: int | None
    timed_out: bool = False

    @property
    def text(self) -> str:
        """The errors, or the output if there are none."""
        return self.stderr if self.stderr.strip() else self.stdout


def run_trial(
    command: Sequence[str],
    values: Mapping[str, Any],
    timeout: float | None,
    interruption: Interruption,
    extra_variables: Mapping[str, str] | None = None,
    reports: ReportReader | None = None,
) -> TrialOutput | None:
    """Run a command in a session of its own, end every process that it started, and return the output.

    After an interruption that is None.

    The symbols' values are for its environment, and ``extra_variables`` too; ``timeout`` is in seconds; ``interruption`` ends
    the trial, too, and so does a sentence of ``reports``.
    """
    mark = uuid.uuid4().hex
    environment = {**trial_environment(values, mark), **(extra_variables or {})}
    with interruption.defer_signals(), _output_file() as out, _output_file() as err, _run_watcher(mark):
        start = time.monotonic()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        try:
            exit_code = _wait(process, start, timeout, interruption, reports, out)
            seconds = time.monotonic() - start
        finally:
            kill_whole(process, mark)
        if exit_code is None and interruption.number is not None:
            return None
        pruned = reports is not None and bool(reports.sentence)
        return TrialOutput(_text(out), _text(err), seconds, exit_code, timed_out=exit_code is None and not pruned)


def _output_file() -> IO[bytes]:
    with temporary_file_errors():
        return tempfile.TemporaryFile()


def _wait(
    process: subprocess.Popen[bytes],
    start: float,
    timeout: float | None,
    interruption: Interruption,
    reports: ReportReader | None,
    out: IO[bytes],
) -> int | None:
    """Return the exit code, or None at the time limit, after an interruption, and for a trial that its reports stop.

    Every report is read, also of a trial that has ended meanwhile, so that its outcome does not depend on the moment.
    """
    while interruption.number is None and (timeout is None or time.monotonic() - start < timeout):
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
            break
        if reports is not None and reports.read(out, OUTPUT_BYTES):
            break
    exit_code = process.poll()
    if reports is not None:
        reports.read(out, OUTPUT_BYTES)
    return exit_code


@contextmanager
def _run_watcher(mark: str) -> Iterator[None]:
    """Start a watcher process that kills the trial's processes if this process is killed."""
    command = [sys.executable, "-I", "-S", process_cleanup.__file__, f"{MARK}={mark}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watcher:
        yield
        watcher.communicate(b"done")


def kill_whole(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill the process, its process group, and all processes with the mark in their environment, in any session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    left = process_cleanup.kill_trial_processes(f"{MARK}={mark}")
    with suppress(subprocess.TimeoutExpired):
        process.wait(process_cleanup.KILL_SECONDS)
    if left or process.returncode is None:
        get_logger().warning("processes of the trial survive being killed: %s", left or [process.pid])


def _text(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_BYTES))
    return file.read().decode(errors="replace")
