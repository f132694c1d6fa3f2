"""One process of a calibration: ``python -m slapo_plan.hardware.calibration_rank SETTINGS``."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from .calibration_collectives import collective_seconds_by_size
from .calibration_operators import OperatorTimer
from .calibration_units import unit_seconds
from .rate_curve import Curve


def main() -> None:
    """Measure, and write the result on rank 0."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(settings["threads"])
    cuda = settings["device_type"] == "cuda"
    rank, world, folder = settings["rank"], settings["world"], Path(settings["folder"])
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=world)
    measured = []
    for count in settings["counts"]:
        groups = {
            size: [dist.new_group([*range(first, first + size)]) for first in range(0, count, size)] for size in _sizes(count)
        }
        if rank < count:
            own = {size: made[rank // size] for size, made in groups.items()}
            measured.append(_measure(count, own, device))
        dist.barrier()
    if rank == 0:
        memory = torch.cuda.get_device_properties(device).total_memory if cuda else _machine_memory()
        (folder / "result.json").write_text(json.dumps({"measured": measured, "memory_bytes": memory}))
    dist.barrier()
    dist.destroy_process_group()


def _sizes(count: int) -> list[int]:
    """Return the sizes of groups that are measured while so many ranks work."""
    return sorted({size for size in (2, count) if count % size == 0})


def _measure(count: int, groups: dict[int, Any], device: torch.device) -> dict[str, Any]:
    everyone = groups[count]

    def agree(seconds: float) -> float:
        """Return the mean over the ranks."""
        found: list[Any] = [None] * count
        dist.all_gather_object(found, seconds, group=everyone)
        return fmean(found)

    align: Callable[[], Any] = lambda: dist.barrier(group=everyone)  # noqa: E731
    timer = OperatorTimer(device, align, agree, count, cores())
    collectives = {}
    for size, group in groups.items():
        if size > 1:
            found = collective_seconds_by_size(group, device, align)
            collectives.update({f"{kind} {size}": [[n, agree(seconds)] for n, seconds in row] for kind, row in found.items()})
    pointwise, in_place = timer.pointwise(), timer.in_place()
    launch, hook = timer.launch_seconds()
    unit = unit_seconds(everyone, device, align, {key: Curve(row, rises=True) for key, row in collectives.items()})
    return {
        "ranks": count,
        "launch_seconds": launch,
        "hook_seconds": hook,
        "unit_seconds": agree(unit),
        "matmul": timer.matmul(),
        "attention": timer.attention(),
        "pointwise": pointwise,
        "in_place": in_place,
        "operators": timer.operators(pointwise, in_place),
        "collectives": collectives,
    }


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
