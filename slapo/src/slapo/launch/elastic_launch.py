"""Start one process per rank on this machine, and end them all when one of them fails or the user presses Ctrl-C."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from slapo_core import SlapoError

from ..run_data.settings import Settings
from .errors import InterruptedRunError, RankError
from .signals import TERMINATION_SIGNALS, signal_handler

ADDRESS = "127.0.0.1"
BACKEND = "slapo-loopback"


SHUTDOWN_SECONDS = 5
"""Seconds that a rank has to end after a signal before it is killed."""

LOST_CONNECTION_SECONDS = 2.0
"""Seconds that a rank with a lost connection waits before it ends, so that the rank that broke it is seen first."""

FORK_SERVER_MODULES = [
    "slapo.launch.fork_server_preload",
    "slapo.training.worker",
    "torch._dynamo",
    "transformers.modeling_layers",
]
"""Modules that the fork server imports once for all ranks, in this order; optimizers import dynamo, models the layers."""

RankFunction = Callable[[Settings], None]
"""Function that every rank runs; it must be at module level."""


def launch_ranks(work: RankFunction, settings: Settings) -> None:
    """Run ``work(settings)`` on ``settings.world_size`` ranks with torch's elastic launcher, and wait for them.

    Raises:
        RankError: a rank failed.
        InterruptedRunError: Ctrl-C, or another signal that ends a process.
    """
    use_loopback()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _silence_elastic_logs()
    with signal_handler(_terminate), tempfile.TemporaryDirectory(prefix="slapo-") as folder:
        try:
            _start_fork_server()
            elastic_launch(_config(settings), _run_rank)(work, settings, folder)
        except ChildFailedError as err:
            raise _root_cause(Path(folder), err.failures) from None
        except SignalException as err:
            raise InterruptedRunError(err.sigval) from None


def _silence_elastic_logs() -> None:
    """Silence the elastic launcher, which logs the end of every rank; ``RankError`` has the cause once."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _config(settings: Settings) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend=BACKEND,
        local_addr=ADDRESS,
        max_restarts=0,
        start_method=_start_method(),
        shutdown_timeout=SHUTDOWN_SECONDS,
    )


def _terminate(number: int, frame: FrameType | None) -> None:
    """Raise ``SignalException``, as the elastic launcher's own handler does once it runs."""
    raise SignalException(f"signal {number}", signal.Signals(number))


def _start_method() -> str:
    """Return the start method: a fork server imports torch once for all ranks, but forking is safe on Linux only."""
    return "forkserver" if sys.platform == "linux" else "spawn"


def _start_fork_server() -> None:
    """Start the fork server and the resource tracker with the terminal's signals blocked.

    Without that, each prints a traceback on Ctrl-C. The tracker keeps them blocked, as it ends after the launcher.
    """
    if _start_method() == "forkserver":
        multiprocessing.set_forkserver_preload(FORK_SERVER_MODULES)
        for start in (resource_tracker.ensure_running, forkserver.ensure_running):
            signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION_SIGNALS)
            try:
                start()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINATION_SIGNALS)


def _run_rank(work: RankFunction, settings: Settings, folder: str) -> None:
    """Run the work in a process of its own and leave the error, if any, in ``folder``."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    for number in TERMINATION_SIGNALS:  # the terminal sends Ctrl-C to every rank: end without a traceback
        signal.signal(number, signal.SIG_DFL)
    try:
        work(settings)
    except Exception as err:
        rank = os.environ["RANK"]
        record = {
            "time": time.time_ns(),
            "rank": int(rank),
            "bystander": _lost_connection(err),
            "message": str(err) if isinstance(err, SlapoError) else f"{type(err).__name__}: {err}",
            "traceback": "" if isinstance(err, SlapoError) else traceback.format_exc(),
        }
        unfinished = Path(folder, f"rank{rank}.unfinished")
        unfinished.write_text(json.dumps(record))
        unfinished.rename(Path(folder, f"rank{rank}.json"))  # this rank may be ended at any moment
        if record["bystander"]:
            time.sleep(LOST_CONNECTION_SECONDS)
        raise


def _end_with_launcher() -> None:
    """End this rank when the process that launched it has gone, killed even; the fork server goes with its last rank."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        os._exit(1)


def _lost_connection(err: Exception) -> bool:
    """Return whether the error only says that the connection to another rank was lost."""
    return isinstance(err, dist.DistError) or (isinstance(err, RuntimeError) and "gloo/transport" in str(err))


def _root_cause(folder: Path, failures: dict[int, ProcessFailure]) -> RankError:
    """Return the error of the rank that failed first, other than by a lost connection."""
    records: list[dict[str, Any]] = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    own = [record for record in records if not record["bystander"]]
    silent = [failure for failure in failures.values() if failure.local_rank not in {record["rank"] for record in records}]
    if silent and not own:
        end = silent[0].signal_name() if silent[0].exitcode < 0 else f"exit code {silent[0].exitcode}"
        return RankError(f"rank {silent[0].local_rank} was ended by {end}; all ranks have ended")
    first = min(own or records, key=lambda record: record["time"])
    return RankError(f"rank {first['rank']}: {first['message']}", first["traceback"])


class LoopbackRendezvous(RendezvousHandler):
    """Rendezvous of a single agent, whose store is also the workers'. Its only socket listens on the loopback address.

    Torch's own rendezvous backends listen on every interface of the machine.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store, self._port = _listen()

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(ADDRESS, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no other agent can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def use_loopback() -> None:
    """Register the backend, and keep gloo's and nccl's sockets of processes started from here on the loopback interface."""
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
    interface = "lo0" if sys.platform == "darwin" else "lo"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)


def _listen() -> tuple[TCPStore, int]:
    listener = socket.socket()
    listener.bind((ADDRESS, 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = TCPStore(
        ADDRESS, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )
    return store, port
