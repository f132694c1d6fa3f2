"""Pool of gloo worker processes: started on first use, shared by all tests, ended with the session."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from slapo_core import SlapoError

from .fork_server import ForkServer
from .job_transport import FunctionRef, Job, Report, unpickle

MAX_WORKERS = 4
"""Size of the pool; importing torch costs seconds and some hundred MiB per worker."""

_START_SECONDS = 180.0
"""Time for a worker to start; the machine may be busy."""

_GRACE_SECONDS = 1.0
"""Time for the other ranks to fail or finish after a rank has failed; then they are killed."""


class DistributedError(SlapoError):
    """A rank failed, died, or was still running at the time limit.

    Attributes:
        rank: The first rank that failed.
        traceback: Its traceback, or its stacks if it died or was stuck.
    """

    def __init__(self, message: str, *, rank: int, traceback: str) -> None:
        self.rank = rank
        self.traceback = traceback
        super().__init__(f"{message}\n\n{traceback}" if traceback else message)


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``world_size`` processes that form the default gloo process group.

    Every call starts with a new process group, the environment, folder and ``sys.path`` of the caller, seed 0, one thread and
    torch's default settings. Modules stay imported.

    Args:
        fn: A function at module level, of any module or script that is a file.
        world_size: Number of ranks, at most ``MAX_WORKERS``.
        *args: Picklable values, the same for every rank.
        timeout: Seconds until ranks that still run are killed.

    Returns:
        The result of each rank, by rank; tensors in it are detached.

    Raises:
        DistributedError: a rank raised, died or ran out of time. No rank is left running.
        TypeError: ``fn`` is not at module level.
        ValueError: too many ranks.
    """
    if not 1 <= world_size <= MAX_WORKERS:
        raise ValueError(f"run_distributed: world_size is {world_size}; the pool has 1 to {MAX_WORKERS} workers")
    payload = pickle.dumps(args)
    with _pool.lock:
        return _pool.run(FunctionRef.of(fn), payload, world_size, timeout)


def clean_up_with(fn: Callable[[], object]) -> None:
    """Make each rank call a function after each job, when its process group is destroyed.

    Args:
        fn: A function at module level, which frees the objects that a job leaves in globals of a library.
    """
    _pool.cleanup = FunctionRef.of(fn)


def preload(*modules: str) -> None:
    """Import modules once for all workers, since each worker would take seconds to import them.

    Args:
        *modules: Their names; those that are not installed are skipped. Importing one must start no thread. Running workers are
            not affected: call this before the first ``run_distributed``, or after ``shutdown_workers``.
    """
    _pool.modules = modules


def shutdown_workers() -> None:
    """End all workers. The next ``run_distributed`` starts new ones. Called automatically when the process exits."""
    with _pool.lock:
        _pool.close()


class _Worker:
    """One worker process, and the test process's ends of its pipes."""

    def __init__(self, server: ForkServer) -> None:
        self.dump: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  lives as long as the worker
        self.jobs, remote = Pipe()
        stdin, self._stdin = os.pipe()
        try:
            self.process = server.fork(stdin, remote.fileno(), self.dump.fileno())
        except OSError as err:
            self.dump.close()
            self.jobs.close()
            os.close(self._stdin)
            server.close()
            raise DistributedError(f"a worker process did not start: {err}", rank=0, traceback="") from err
        finally:
            os.close(stdin)
            remote.close()
        self.ready = False

    def wait_until_ready(self) -> None:
        """Wait until the worker has imported its modules, so that a job's time limit need not cover that."""
        if self.ready or (self.jobs.poll(_START_SECONDS) and self._is_alive()):
            self.ready = True
            return
        raise DistributedError("a worker process did not start", rank=0, traceback=self.stacks())

    def _is_alive(self) -> bool:
        try:
            return bool(self.jobs.recv_bytes())
        except (EOFError, ConnectionResetError):
            return False

    def stacks(self) -> str:
        """Return the output of faulthandler since the last call."""
        self.dump.seek(0)
        text = self.dump.read()
        self.dump.seek(0)
        self.dump.truncate()
        return text.strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._stdin)
        self.jobs.close()
        self.dump.close()


@dataclass
class _Rank:
    """Progress of one rank of the running job."""

    worker: _Worker
    result: Any = None
    error: tuple[str, str] | None = None
    when: float = 0.0
    done: bool = False
    released: bool = False
    idle: bool = False

    def take(self, report: Report) -> None:
        if report.kind == "idle":
            self.idle = True
            return
        self.done, self.when = True, report.when
        body = unpickle(report.body)
        if report.kind == "error":
            self.error = body
        else:
            self.result = body

    def release(self) -> None:
        """Let the rank leave the process group."""
        if self.done and not self.released and self.worker.process.returncode is None:
            self.released = True
            with suppress(BrokenPipeError):  # it died meanwhile, which the next wait finds out
                self.worker.jobs.send_bytes(b"release")

    def record_exit(self) -> None:
        """Record why the process ended. Sorts before the errors that this causes on other ranks."""
        try:
            code = self.worker.process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.worker.process.kill()
            code = self.worker.process.wait()
        if not self.done:  # what it reported before it died is what the caller asked for
            what = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            self.done, self.error = True, (f"its process {what}", self.worker.stacks())


@dataclass
class _Pool:
    lock: threading.Lock = field(default_factory=threading.Lock)
    workers: list[_Worker] = field(default_factory=list)
    folder: str = ""
    number: int = 0
    cleanup: FunctionRef | None = None
    modules: tuple[str, ...] = ()
    server: ForkServer | None = None

    def run(self, fn: FunctionRef, payload: bytes, world_size: int, timeout: float) -> list[Any]:
        self._start(world_size)
        ranks = [_Rank(worker) for worker in self.workers[:world_size]]
        try:
            self._send(ranks, fn, payload, timeout)
            self._wait(ranks, time.monotonic() + timeout)
            _raise_first(ranks, timeout)
            return [rank.result for rank in ranks]
        finally:
            if not all(rank.idle for rank in ranks):  # stuck, dead, or the wait was interrupted
                self._end_workers()

    def _start(self, count: int) -> None:
        if not self.folder:
            self.folder = tempfile.mkdtemp(prefix="slapo-workers-")
        if any(worker.process.poll() is not None for worker in self.workers):
            self._end_workers()
        if self.server is not None and not self.server.is_alive():
            self._end_server()
        self.server = self.server or ForkServer(self.modules)
        self.workers += [_Worker(self.server) for _ in range(count - len(self.workers))]
        for worker in self.workers[:count]:
            try:
                worker.wait_until_ready()
            except BaseException:
                self.workers.remove(worker)
                worker.end()
                raise

    def _send(self, ranks: Sequence[_Rank], fn: FunctionRef, payload: bytes, timeout: float) -> None:
        self.number += 1
        store = str(Path(self.folder, str(self.number)))
        common = (timeout, store, dict(os.environ), list(sys.path), os.getcwd())
        for index, rank in enumerate(ranks):
            job = Job(self.number, fn, payload, index, len(ranks), *common, self.cleanup)
            rank.worker.jobs.send_bytes(pickle.dumps(job))

    def _wait(self, ranks: Sequence[_Rank], limit: float) -> None:
        """Receive reports until every rank is idle or dead, the limit is reached, or the grace time after the first failure
        is over.
        """
        while waiting := [rank for rank in ranks if not rank.idle and rank.worker.process.returncode is None]:
            ready = wait([rank.worker.jobs for rank in waiting], max(0.0, limit - time.monotonic()))
            if not ready:
                return
            for rank in waiting:
                if rank.worker.jobs in ready:
                    _receive(rank)
            failed = any(rank.error for rank in ranks)
            if failed:
                limit = min(limit, time.monotonic() + _GRACE_SECONDS)
            if failed or all(rank.done for rank in ranks):
                for rank in ranks:
                    rank.release()

    def _end_workers(self) -> None:
        """End all workers. Libraries number the objects they create, so ranks must have the same history."""
        while self.workers:
            self.workers.pop().end()

    def _end_server(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    def close(self) -> None:
        self._end_workers()
        self._end_server()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""


def _receive(rank: _Rank) -> None:
    try:
        rank.take(unpickle(rank.worker.jobs.recv_bytes()))
    except (EOFError, ConnectionResetError):
        rank.record_exit()


def _raise_first(ranks: Sequence[_Rank], timeout: float) -> None:
    failed = [(rank.when, index, rank.error) for index, rank in enumerate(ranks) if rank.error]
    if failed:
        _, index, (headline, trace) = min(failed)
        raise DistributedError(f"rank {index} of {len(ranks)}: {headline}", rank=index, traceback=trace)
    stuck = [index for index, rank in enumerate(ranks) if not rank.done]
    if stuck:
        names = ", ".join(map(str, stuck))
        stacks = "\n\n".join(f"rank {index}:\n{_stacks_now(ranks[index].worker)}" for index in stuck)
        message = f"rank {names} of {len(ranks)} still running after {timeout:g} s"
        raise DistributedError(message, rank=stuck[0], traceback=stacks)


def _stacks_now(worker: _Worker) -> str:
    worker.process.send_signal(signal.SIGUSR1)
    for _ in range(20):
        time.sleep(0.05)
        if text := worker.stacks():
            return text
    return "(no stack: the process does not react)"


_pool = _Pool()
atexit.register(shutdown_workers)
