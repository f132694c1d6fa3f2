"""``python -m slapo_tune.measurement.launcher JOB ORDER``: the processes of a trial, one per rank, forked from this one.

What every rank imports is imported here once. The first rank that fails ends the others, and its error is printed as a line of
JSON, ``{"error": "..."}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimizer of every rank would import
import torch.distributed as dist

from slapo_core import SlapoError

from ..trial.process import signal_name
from .job import TrialJob
from .rank_work import work_as_rank

BYSTANDER_SECONDS = 2.0
"""Seconds that a rank with a lost connection waits before it ends, so that the rank that broke it is seen first."""

SHUTDOWN_SECONDS = 3.0
"""Seconds that the other ranks have, after one has failed, to leave errors of their own."""

POLL_SECONDS = 0.02


def main(job_file: str, order_text: str) -> int:
    """Run a trial and return the exit status: 1 if a rank failed."""
    order = json.loads(order_text)
    interface = "lo0" if sys.platform == "darwin" else "lo"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="slapo-trial-", dir=Path(job_file).parent) as folder:
        problem = run_ranks(order["ranks"], lambda rank: _run_rank(Path(job_file), order, rank, Path(folder)), Path(folder))
    if problem:
        print(json.dumps({"error": problem}), flush=True)
    return 1 if problem else 0


def run_ranks(number: int, work: Callable[[int], None], folder: Path) -> str:
    """Fork a process per rank and wait for all; return the error of the rank that failed first, or ``""``."""
    ranks = {_fork(work, rank): rank for rank in range(number)}
    ends: dict[int, int] = {}
    deadline = float("inf")
    while ranks and time.monotonic() < deadline:
        for pid, rank in list(ranks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del ranks[pid]
                ends[rank] = os.waitstatus_to_exitcode(status)
                deadline = min(deadline, time.monotonic() + SHUTDOWN_SECONDS) if ends[rank] else deadline
        time.sleep(POLL_SECONDS)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return _root_cause(folder, ends)


def _fork(work: Callable[[int], None], rank: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work(rank)
            status = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return pid


def _run_rank(job_file: Path, order: dict[str, Any], rank: int, folder: Path) -> None:
    try:
        work_as_rank(TrialJob.load(job_file), order, rank, folder)
    except BaseException as err:
        record = {"time": time.time_ns(), "rank": rank, "bystander": _lost_connection(err), "message": error_sentence(err)}
        unfinished = folder / f"rank{rank}.unfinished"
        try:
            unfinished.write_text(json.dumps(record))
            unfinished.rename(folder / f"rank{rank}.json")
        except OSError as full:  # this rank ends without a record, and these are the last words of the trial
            print(f"{record['message']}; and its record cannot be written: {full}", file=sys.stderr, flush=True)
            os._exit(1)
        if not isinstance(err, SlapoError):
            traceback.print_exc()
        if record["bystander"]:
            time.sleep(BYSTANDER_SECONDS)
        sys.stderr.flush()
        os._exit(1)


def error_sentence(error: BaseException) -> str:
    """Return an error as one line; running out of memory begins with these words, on every device."""
    text = " ".join(str(error).split())
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text:
        return f"out of memory: {text or type(error).__name__}"
    return text if isinstance(error, SlapoError) else f"{type(error).__name__}: {text}"


def _lost_connection(error: BaseException) -> bool:
    """Return whether the error only says that the connection to another rank was lost."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _root_cause(folder: Path, ends: dict[int, int]) -> str:
    records: list[dict[str, Any]] = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    own = [record for record in records if not record["bystander"]]
    silent = [rank for rank, code in ends.items() if code and rank not in {record["rank"] for record in records}]
    if silent and not own:
        code = ends[silent[0]]
        killed = ", as the system does where memory runs out" if code == -signal.SIGKILL else ""
        end = f"{signal_name(-code)}{killed}" if code < 0 else f"exit code {code}"
        return f"rank {silent[0]} was ended by {end}"
    first = min(own or records, key=lambda record: record["time"], default=None)
    return f"rank {first['rank']}: {first['message']}" if first else ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
