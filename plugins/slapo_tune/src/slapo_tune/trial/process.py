"""One run of the training script in a process of its own, which ends with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from slapo_core import get_logger

from . import process_cleanup
from .environment import MARK, trial_environment
from .interruption import Interruption

POLL_SECONDS = 0.05

OUTPUT_BYTES = 16 * 2**20
"""Bytes that are read from the end of a trial's output."""


@dataclass(frozen=True)
class TrialOutput:
    """Output and end of a trial.

    Args:
        stdout: The end of its output.
        stderr: The end of its errors.
        exit_code: Exit code of its first process; None if the tuner killed it.
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
    command: Sequence[str], values: Mapping[str, Any], timeout: float | None, interruption: Interruption
) -> TrialOutput | None:
    """Run a command in a session of its own, end every process that it started, and return the output.

    After an interruption that is None.

    The symbols' values are for its environment; ``timeout`` is in seconds; ``interruption`` ends the trial, too.
    """
    mark = uuid.uuid4().hex
    environment = trial_environment(values, mark)
    with interruption.defer_signals(), tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, _run_watcher(mark):
        start = time.monotonic()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        try:
            exit_code = _wait(process, start, timeout, interruption)
            seconds = time.monotonic() - start
        finally:
            kill_whole(process, mark)
        if exit_code is None and interruption.number is not None:
            return None
        return TrialOutput(_text(out), _text(err), seconds, exit_code, timed_out=exit_code is None)


def _wait(process: subprocess.Popen[bytes], start: float, timeout: float | None, interruption: Interruption) -> int | None:
    """Return the exit code, or None at the time limit and after an interruption."""
    while interruption.number is None and (timeout is None or time.monotonic() - start < timeout):
        with suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_SECONDS)
    return process.poll()


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
        get_logger().warning("processes of the trial do not end, killed as they are: %s", left or [process.pid])


def _text(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_BYTES))
    return file.read().decode(errors="replace")
