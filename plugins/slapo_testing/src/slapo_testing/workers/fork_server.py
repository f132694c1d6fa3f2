"""Process that imports torch once and forks the workers of the pool, each in milliseconds."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

_MAIN = "import sys; from slapo_testing.workers.fork_server import main; main(int(sys.argv[1]), sys.argv[2:])"
_START_SECONDS = 180.0
"""Time for the server to import torch; the machine may be busy."""

_FORK, _WAIT = 0, 1
_MESSAGE = struct.Struct("qq")
_RUNNING = 1 << 16
"""Value in place of the exit code of a running process; exit codes are smaller."""


class ForkServer:
    """Client of the fork server process, which imports torch, and of ``modules`` those that are installed."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._control, remote = socket.socketpair()
        self._control.settimeout(_START_SECONDS)
        # who asks the driver for its devices may not fork: torch is to ask NVML
        own = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        environ = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", _MAIN, str(remote.fileno()), *modules]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[remote.fileno()], env=environ)
        remote.close()

    def fork(self, stdin: int, jobs: int, dump: int) -> ForkedProcess:
        """Start a worker with these three file descriptors.

        Raises:
            OSError: the server has ended, or does not answer.
        """
        socket.send_fds(self._control, [_MESSAGE.pack(_FORK, 0)], [stdin, jobs, dump])
        return ForkedProcess(self, self._receive_reply()[0])

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a worker, negative for a signal; None while it runs."""
        try:
            self._control.sendall(_MESSAGE.pack(_WAIT, pid))
            code = self._receive_reply()[1]
        except OSError:  # the server has ended, which alone could know the code
            self.close()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return -signal.SIGKILL
        return None if code == _RUNNING else code

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the server. Forked workers keep running."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _receive_reply(self) -> tuple[int, int]:
        message = self._control.recv(_MESSAGE.size, socket.MSG_WAITALL)
        if len(message) < _MESSAGE.size:
            raise ConnectionResetError("the process that forks workers has ended")
        pid, code = _MESSAGE.unpack(message)
        return pid, code


class ForkedProcess:
    """Worker process, with the methods of ``subprocess.Popen`` that the pool calls."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if limit is not None and time.monotonic() > limit:
                raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def main(control_fd: int, modules: Sequence[str]) -> None:
    """Import the modules that workers need, then serve requests to fork or to poll a worker, until the other end closes."""
    from . import worker_process  # noqa: PLC0415  the process that asks needs none of it

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    for name in modules:
        with suppress(ImportError):  # what is not installed, or in part, is reported by the job that needs it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=control_fd)
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MESSAGE.size, 3)
        if not message:
            return
        request, pid = _MESSAGE.unpack(message)
        code = 0
        if request == _WAIT:
            done, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else _RUNNING
        elif (pid := os.fork()) == 0:
            control.close()
            _run_worker(worker_process.main, *fds)
        for fd in fds:
            os.close(fd)
        control.sendall(_MESSAGE.pack(pid, code))


def _run_worker(serve: Callable[[int, int], None], stdin: int, jobs: int, dump: int) -> NoReturn:
    """Run the worker in the forked process."""
    try:
        os.dup2(stdin, 0)
        os.close(stdin)
        serve(jobs, dump)
    finally:
        os._exit(1)  # what the server would do at its end is not for its workers
