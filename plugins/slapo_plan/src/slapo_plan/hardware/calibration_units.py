"""Measured seconds of Python for FSDP units."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ..recording import OperatorRecorder
from ..records import CollectiveRecord
from .calibration_operators import TinyBlock
from .rate_curve import Curve

_ROUNDS, _STEPS, _BLOCKS = 5, 8, 4


def unit_seconds(
    group: dist.ProcessGroup, device: torch.device, align: Callable[[], Any], collectives: Mapping[str, Curve]
) -> float:
    """Return what a step of tiny units takes longer than without FSDP, for each collective and beside its measured seconds.

    Collective over ``group``; 0 for one rank.

    Args:
        group: Group of the replicas.
        device: Device of this rank.
        align: Waits for all ranks.
        collectives: Measured seconds by bytes, by kind and number of ranks.
    """
    if group.size() < 2:
        return 0.0
    plain, sharded = (nn.Sequential(*(TinyBlock() for _ in range(_BLOCKS))).to(device) for _ in range(2))
    mesh = DeviceMesh.from_group(group, device.type)
    for block in sharded:
        fully_shard(block, mesh=mesh)
    given = torch.rand(1, 4, 16, device=device)
    with OperatorRecorder() as recorder:
        _step(sharded, given, device)
    sent = [each for each in recorder.records if isinstance(each, CollectiveRecord)]
    apart = sum(collectives[f"{each.kind} {group.size()}"].at(each.nbytes) for each in sent)
    plain_seconds, sharded_seconds = (_median_round(partial(_step, model, given, device), align) for model in (plain, sharded))
    return max(0.0, sharded_seconds - plain_seconds - apart) / len(sent)


def _step(model: nn.Module, given: torch.Tensor, device: torch.device) -> None:
    torch.autograd.backward(model(given).sum())
    if device.type == "cuda":
        torch.cuda.synchronize()


def _median_round(step: Callable[[], None], align: Callable[[], Any]) -> float:
    """Return the mean seconds of a step in the median of some rounds."""
    rounds = []
    step()
    for _ in range(_ROUNDS):
        align()
        start = time.perf_counter()
        for _ in range(_STEPS):
            step()
        rounds.append((time.perf_counter() - start) / _STEPS)
    return median(rounds)
