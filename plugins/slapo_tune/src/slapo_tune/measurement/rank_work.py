"""Work of one rank of a trial: build the engine and measure its steps, or verify it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slapo_core import Schedule, build, set_random_seed
from slapo_verify import verify_engine

from ..schedule_space.schedule_space import ScheduleSpace
from .job import AXES, TrialJob
from .step_timing import StepMeasurement, time_steps

JOIN_SECONDS = 600
"""Seconds that a rank waits for the others; the tuner's time limit is usually shorter."""


def work_as_rank(job: TrialJob, order: Mapping[str, Any], rank: int, folder: Path) -> None:
    """Do the work of a rank; rank 0 prints the result as a line of JSON.

    Args:
        job: The subject.
        order: ``"values"`` of the configuration; and ``"mode"``, ``"measure"`` or ``"verify"``.
        rank: Global rank.
        folder: Folder of the trial, where the ranks meet.
    """
    values = order["values"]
    sizes = job.sizes(values)
    world = sizes[0] * sizes[1] * sizes[2]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if job.device == "cuda" else "gloo"
    store = dist.FileStore(str(folder / "rendezvous"), world)  # type: ignore[attr-defined]  # public, but not in __all__
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=JOIN_SECONDS))
    mesh = init_device_mesh(job.device, sizes, mesh_dim_names=AXES)
    result = _verify(job, values, mesh) if order["mode"] == "verify" else _measure(job, order, mesh)
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def _measure(job: TrialJob, order: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    values = order["values"]
    set_random_seed(job.seed, tp_rank=mesh["tp"].get_local_rank())  # replicas alike: a schedule may make modules
    sch = job.make_schedule(job.trial_model(), mesh, ScheduleSpace(values), values)
    engine = build(sch, job.target, optimizer=job.optimizer, loss_fn=job.loss_fn, seed=job.seed, **job.build_options(values))
    args, kwargs = job.share(mesh["dp"].size(), mesh["dp"].get_local_rank())

    def step() -> None:
        engine.train_batch(*args, **kwargs)
        if job.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def report(measured: StepMeasurement) -> None:
        if dist.get_rank() == 0:
            print(json.dumps({"step": measured.steps, **_figures(job, measured)}), flush=True)

    timing = time_steps(step, job.measurement, report, _value_of_rank_0)
    result = {"steps": timing.steps, **_figures(job, timing)}
    if job.device == "cuda":
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    return result


def _figures(job: TrialJob, measured: StepMeasurement) -> dict[str, Any]:
    """Return samples a second, their interval, and seconds of a step."""
    interval = measured.interval and [job.rows / measured.interval[1], job.rows / measured.interval[0]]
    return {"throughput": job.rows / measured.seconds, "interval": interval, "seconds": measured.seconds}


def _value_of_rank_0(value: bool) -> bool:
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _verify(job: TrialJob, values: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    model = job.whole_model()
    set_random_seed(job.seed, tp_rank=mesh["tp"].get_local_rank())
    schedule = partial(_schedule_copy, job, mesh, values)
    options = job.build_options(values)
    report = verify_engine(model, schedule, job.batch, job.target, loss_fn=job.loss_fn, **options)
    blame = str(report.blame).partition("\n")[0] if report.blame else ""
    told = "" if report.ok else "; ".join(filter(None, [report.differences[0].message, blame]))
    return {"verified": report.ok, "report": told}


def _schedule_copy(job: TrialJob, mesh: DeviceMesh, values: Mapping[str, Any], model: nn.Module) -> Schedule:
    return job.make_schedule(model, mesh, ScheduleSpace(values), values)
