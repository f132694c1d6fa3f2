"""One run of the training script in a process of its own, which ends with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from slapo_core.logger import get_logger

from .environment import MARK, trial_environment
from .interruption import Interruption

POLL_SECONDS = 0.05
KILL_SECONDS = 10.0
"""How long processes that were killed are waited for; those that wait for a device may take longer."""


@dataclass(frozen=True)
class TrialOutput:
    """What a trial printed, and how it ended.

    Args:
        stdout: Its output.
        stderr: Its errors.
        seconds: How long it ran.
        exit_code: Of its first process; None where it was ended from here.
        timed_out: Whether it was ended at the time limit.
    """

    stdout: str
    stderr: str
    seconds: float
    exit_code: int | None
    timed_out: bool = False

    @property
    def text(self) -> str:
        """The errors, or the output where there are none."""
        return self.stderr if self.stderr.strip() else self.stdout


def run_trial(
    command: Sequence[str], values: Mapping[str, Any], timeout: float | None, interruption: Interruption
) -> TrialOutput | None:
    """Run a command in a session of its own, and end every process that it started.

    Args:
        command: Program and arguments.
        values: Values of the symbols, for the environment.
        timeout: Seconds after which the trial is killed; None for no limit.
        interruption: Ends the trial, too.

    Returns:
        The output, or None after an interruption.
    """
    mark = uuid.uuid4().hex
    environment = trial_environment(values, mark)
    with interruption.deferred(), tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
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


def kill_whole(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill the process, its group, and whatever has the mark in its environment: processes in sessions of their own, too."""
    deadline = time.monotonic() + KILL_SECONDS
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    while (others := [*_marked(mark)]) and time.monotonic() < deadline:
        for pid in others:  # again, as one may have started another meanwhile
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS / 5)
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
    if others or process.returncode is None:
        get_logger().warning("processes of the trial do not end, killed as they are: %s", others or [process.pid])


def _marked(mark: str) -> Iterator[int]:
    """Iterate over the processes with the mark, by Linux's table of processes; elsewhere the group is all there is."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
