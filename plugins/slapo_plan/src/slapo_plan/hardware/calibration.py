"""Measures the machine it runs on, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from slapo_core import SlapoError

from .cluster_parts import Link, Measurements
from .description import Hardware
from .rate_curve import Curve

_TIMEOUT = 600.0


def calibrate(
    ranks: Sequence[int] = (1, 2, 4), threads: int = 1, device_type: str | None = None, name: str = "calibrated"
) -> Hardware:
    """Return this machine's hardware with measured curves: products, attention, element-wise operators, launches, collectives.

    Starts as many processes as the largest number in ``ranks``. For each number, so many of them measure at the same time, as
    they compete for cores and memory in training. Takes about 15 seconds for each number.

    Args:
        ranks: Numbers of ranks that will work on this machine at the same time.
        threads: Threads of each rank; ``torchrun`` gives each one.
        device_type: ``"cpu"`` or ``"cuda"``, one GPU for each rank; by default GPUs where there are any.
        name: Name of the hardware.

    Raises:
        SlapoError: no or negative numbers of ranks, fewer GPUs than ranks, or a process failed or took longer than 10 minutes.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    counts = sorted({*ranks})
    if not counts or counts[0] < 1:
        raise SlapoError(f"ranks is {[*ranks]}; give numbers of ranks from 1 on, e.g. (1, 2)")
    if device_type == "cuda" and counts[-1] > torch.cuda.device_count():
        raise SlapoError(f"{counts[-1]} ranks, but {torch.cuda.device_count()} GPUs; calibrate with fewer ranks")
    with tempfile.TemporaryDirectory(prefix="slapo-calibrate-") as folder:
        found = _measure(Path(folder), {"counts": counts, "threads": threads, "device_type": device_type})
    measurements = tuple(_measurements(each) for each in found["measured"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = max(counts[-1], cores if device_type == "cpu" else torch.cuda.device_count())
    memory = int(found["memory_bytes"]) // (devices if device_type == "cpu" else 1)
    link = _link(measurements)
    return Hardware(
        name=name,
        memory_bytes=memory,
        usable_bytes=int(memory * 0.9),
        flops={dtype: max(value for _, value in curve.points) for dtype, curve in measurements[0].matmul.items()},
        bandwidth=measurements[0].pointwise.points[-1][1],
        launch_seconds=measurements[0].launch_seconds,
        devices_per_node=devices,
        link=link,
        network=link,
        device_type=device_type,
        measurements=measurements,
    )


def _measurements(found: Mapping[str, Any]) -> Measurements:
    return Measurements(
        ranks=found["ranks"],
        launch_seconds=found["launch_seconds"],
        matmul={key: Curve(points) for key, points in found["matmul"].items()},
        attention={key: Curve(points) for key, points in found["attention"].items()},
        pointwise=Curve(found["pointwise"]),
        in_place=Curve(found["in_place"]),
        operators=found["operators"],
        collectives={key: Curve(_without_disturbance(points), rises=True) for key, points in found["collectives"].items()},
        hook_seconds=found["hook_seconds"],
        unit_seconds=found["unit_seconds"],
    )


def _without_disturbance(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return points without disturbed measurements: no transfer takes longer than a larger one."""
    seconds = [*accumulate((value for _, value in reversed(points)), min)]
    return [(size, value) for (size, _), value in zip(points, reversed(seconds), strict=True)]


def _link(measurements: Sequence[Measurements]) -> Link:
    """Return the link that the measured messages follow; a guess if one rank alone was measured."""
    curves = [each.collectives["send 2"] for each in measurements if "send 2" in each.collectives]
    if not curves:
        return Link(bandwidth=1e9, latency=1e-4)
    nbytes, seconds = curves[0].points[-1]
    latency = curves[0].points[0][1]
    return Link(bandwidth=nbytes / max(seconds - latency, seconds / 10), latency=latency)


def _measure(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run the processes; return what rank 0 wrote."""
    world = max(settings["counts"])
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(variables, str(settings["threads"])), "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = []
    try:
        for rank in range(world):
            arguments = json.dumps({**settings, "rank": rank, "world": world, "folder": str(folder)})
            command = [sys.executable, "-m", "slapo_plan.hardware.calibration_rank", arguments]
            with (folder / f"log{rank}").open("wb") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        _wait(processes, folder)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait for all processes; raise as soon as one has failed, since the others wait for it."""
    end = time.monotonic() + _TIMEOUT
    states: list[int | None] = [None]
    while None in states and not any(states):
        states = [process.poll() for process in processes]
        if time.monotonic() > end:
            raise SlapoError(f"calibration took more than {_TIMEOUT:.0f} seconds; calibrate with fewer ranks")
        time.sleep(0.05)
    failed = next((rank for rank, status in enumerate(states) if status), None)
    if failed is not None:
        lines = (folder / f"log{failed}").read_text(errors="replace").strip().splitlines()
        raise SlapoError(f"calibration failed on rank {failed}: {lines[-1] if lines else 'it ended without a message'}")
