"""A rendezvous for one machine whose only socket listens on the loopback address.

Torch's own rendezvous backends listen on every interface of the machine.
"""

from __future__ import annotations

import os
import socket
import sys

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

ADDRESS = "127.0.0.1"
BACKEND = "slapo-loopback"


class LoopbackRendezvous(RendezvousHandler):
    """Rendezvous of a single agent, whose store is also the workers'."""

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
