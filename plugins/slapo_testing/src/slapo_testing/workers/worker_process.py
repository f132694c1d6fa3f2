"""Process of one rank: receives jobs from a socket, runs each in a new process group, and cleans up."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its functions default to the world of the moment it is imported: here, none

from slapo_core import get_cuda_rng_tracker

from .job_transport import Job, Report, detach_copy, unpickle

_NEW_THREADS, _MOST_THREADS = 24, 72


def main(job_fd: int, dump_fd: int) -> None:
    """Serve jobs until the other end of standard input closes, which the test process holds while it lives.

    ``dump_fd`` is the file for the stacks of a crash, or of a stuck rank (signal USR1).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process, which then lets go of us
    faulthandler.enable(dump_fd)
    faulthandler.register(signal.SIGUSR1, dump_fd, all_threads=True)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    jobs = Connection(job_fd)
    gc.freeze()
    leftovers = _GarbageCollection()
    jobs.send_bytes(pickle.dumps(Report(0, "idle")))
    while True:
        try:
            job = unpickle(jobs.recv_bytes())
        except EOFError:
            os._exit(0)
        _serve(jobs, job, leftovers)


def _exit_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _serve(jobs: Connection, job: Job, leftovers: _GarbageCollection) -> None:
    joining = False
    try:
        _prepare(job)
        fn, arguments = job.fn.load(), job.arguments()
        joining = True
        _join(job)
        joining = False
        body = pickle.dumps(detach_copy(fn(job.rank, *arguments)))
        report = Report(job.number, "result", time.monotonic(), body)
    except BaseException as err:  # whatever it is, the test process has to hear of it
        headline = "".join(traceback.format_exception_only(err)).strip()
        report = Report(job.number, "error", time.monotonic(), pickle.dumps((headline, _format(err))))
    jobs.send_bytes(pickle.dumps(report))
    try:
        jobs.recv_bytes()  # leaving the group while others still join it, or read from us, would fail them
    except EOFError:
        os._exit(0)
    if joining:
        os._exit(1)  # torch counts groups: with another count than the others' it would never meet them again
    if dist.is_initialized():
        dist.destroy_process_group()
    if job.cleanup is not None:
        job.cleanup.load()()
    if not leftovers.collect():
        os._exit(0)  # the next job gets a new process
    jobs.send_bytes(pickle.dumps(Report(job.number, "idle")))


class _GarbageCollection:
    """Garbage collection after jobs, above all of process groups.

    Modules and caches stay, so they are frozen, which makes a collection after each job cheap. A global of a library may hold
    the groups of a job, each with three threads, one of which polls a hundred times a second. If there are many threads, frozen
    objects are collected too. If that does not help, the process must end.
    """

    def __init__(self) -> None:
        self._most = _NEW_THREADS

    def collect(self) -> bool:
        """Collect after a job, and return True if this process may continue."""
        gc.collect()
        if _num_threads() > self._most:
            gc.unfreeze()
            gc.collect()
            self._most = _num_threads() + _NEW_THREADS
        gc.freeze()
        return _num_threads() < _MOST_THREADS


def _num_threads() -> int:
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else 0


def _prepare(job: Job) -> None:
    """Give every job the same initial state."""
    os.environ.clear()
    os.environ.update(job.environ, RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.chdir(job.folder)
    sys.path[:] = job.path
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)  # imports the whole compiler
    torch.manual_seed(0)
    get_cuda_rng_tracker().reset()
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _join(job: Job) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.store, job.world_size),  # type: ignore[attr-defined]
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout + 60),  # the pool's own limit comes first and says more
    )


def _format(err: BaseException) -> str:
    """Return the traceback below this file."""
    trace = err.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(err), err, trace or err.__traceback__))
