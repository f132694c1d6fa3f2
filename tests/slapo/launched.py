"""Work of the ranks in the launcher's tests, in a module of its own as the ranks import it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from slapo.launch.elastic_launch import launch_ranks
from slapo.launch.errors import InterruptedRunError
from slapo.run_data.settings import Settings
from slapo_core import ScheduleError


def add(settings: Settings) -> None:
    """All ranks meet, and write down what they added up."""
    dist.init_process_group("gloo")
    ranks = torch.tensor([dist.get_rank()])
    dist.all_reduce(ranks)
    Path(settings.report, f"rank{dist.get_rank()}").write_text(f"{ranks.item()} {os.environ['OMP_NUM_THREADS']}")
    dist.destroy_process_group()


def fail_by_rule(settings: Settings) -> None:
    """Rank 1 refuses; the others wait for it."""
    _fail(ScheduleError("no such thing", path="h.0", primitive="shard"))


def fail_by_bug(settings: Settings) -> None:
    """Rank 1 has a bug; the others wait for it."""
    _fail(ZeroDivisionError("division by zero"))


def die(settings: Settings) -> None:
    """Rank 1 is killed; the others wait for it."""
    _fail(None)


def wait(settings: Settings) -> None:
    """All ranks say who they are and wait for ever."""
    dist.init_process_group("gloo")
    Path(settings.report, f"pid{os.getpid()}").touch()
    _collectives()


def _fail(error: Exception | None) -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["RANK"] != "1":
        _collectives()
    if error is None:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        raise error


def _collectives() -> None:
    while True:
        dist.barrier()
        time.sleep(0.01)


if __name__ == "__main__":
    try:
        launch_ranks(wait, Settings(tp=2, report=sys.argv[1]))
    except InterruptedRunError as err:
        print(err)
        sys.exit(err.exit_code)
