"""Measured seconds of collectives of a process group by size."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

_SIZES = (2**10, 2**14, 2**17, 2**20, 2**23, 2**25)
"""Bytes of the whole tensor."""
_ROUNDS = 5
_PRODUCT = 256
"""Rows and columns of the product that a rank computes between two collectives."""


def collective_seconds_by_size(
    group: dist.ProcessGroup, device: torch.device, align: Callable[[], Any]
) -> dict[str, list[tuple[int, float]]]:
    """Return the seconds of each kind of collective by bytes, as this rank sees them. Collective over ``group``.

    A step has many collectives and its ranks compute between them, so that what counts is their mean among ranks that compute,
    with the time until both ends are awake. On a CPU it is several times the time of an undisturbed collective, since its
    threads need the cores of the ranks. The median of some rounds leaves out short work of other programs.

    Args:
        group: Group of the collectives; a kind that its backend lacks is left out.
        device: Device of this rank.
        align: Waits for all ranks that measure at the same time.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for nbytes in _SIZES:
        repeats = 30 if nbytes < 2**18 else 15 if nbytes < 2**22 else 4
        for kind, run in _calls(group, device, nbytes).items():
            try:
                run()  # connects
            except (RuntimeError, ValueError, NotImplementedError):  # not in this backend, on all ranks alike
                continue
            rounds = []
            for _ in range(_ROUNDS):
                align()
                rounds.append(fmean(_once(run, device) for _ in range(repeats)))
            found.setdefault(kind, []).append((nbytes, median(rounds)))
    return found


def _once(run: Callable[[], Any], device: torch.device) -> float:
    factor = torch.ones(_PRODUCT, _PRODUCT, device=device)
    torch.mm(factor, factor)
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _calls(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> dict[str, Callable[[], Any]]:
    size, rank = group.size(), group.rank()
    count = max(1, nbytes // 4 // size) * size
    whole, other, part = (torch.zeros(number, device=device) for number in (count, count, count // size))
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    if size == 2:
        calls["send"] = lambda: _swap(group, whole, other, 1 - rank)
    return calls


def _swap(group: dist.ProcessGroup, sent: torch.Tensor, received: torch.Tensor, peer: int) -> None:
    """Send a message each way at the same time, as neighbours of a pipeline do."""
    ends = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
