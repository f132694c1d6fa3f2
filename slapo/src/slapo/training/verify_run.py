"""Run of ``slapo verify``: the launch, and the work of each rank."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slapo_core import get_logger, set_random_seed
from slapo_verify import Report, TrainingResults, run_as_threads, verify, verify_engine

from ..launch.elastic_launch import launch_ranks
from ..run_data.settings import VOCABULARY, Settings, engine_options
from .models import build_model
from .preflight_check import AXES, check_run
from .run_schedule import schedule_model
from .train_run import resolve_device
from .worker import process_group

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class VerifySettings(Settings):
    """The flags of ``slapo verify``, those of the model as for ``slapo train``.

    Args:
        level: What ``slapo.verify`` compares.
        dtype: Type of the parameters, a key of ``DTYPES``; with a ``target`` its precision.
        as_json: Whether the report is made as data.
        processes: Whether every rank is a process; else, on CPUs and without an engine, a thread of this one.
        against: Another engine, whose step is compared with that of ``target`` too.
        clip: Largest gradient norm of the engines; 0 is off.
        out: File that rank 0 writes the report to.
    """

    level: str = "grads"
    dtype: str = "fp32"
    as_json: bool = False
    processes: bool = False
    against: str = ""
    clip: float = 0.0
    out: str = ""


class Verdict(NamedTuple):
    """Result of a verification.

    Args:
        ok: Whether nothing differs.
        report: The report as text, or as data.
    """

    ok: bool
    report: str


def run_verification(settings: VerifySettings) -> Verdict:
    """Verify as the settings say, on ranks of this machine; each of two engines on ranks of its own.

    Raises:
        SlapoError: a mistake found before any rank was started; ``RankError`` when a rank failed; ``InterruptedRunError`` when
            a signal ended the run.
    """
    settings = replace(settings, device=resolve_device(settings), precision=settings.dtype)
    names = [name for name in (settings.against, settings.target) if name]
    for name in names or ["torch"]:
        check_run(replace(settings, target=name), trains=bool(names), reads=False)
    with tempfile.TemporaryDirectory(prefix="slapo-") as folder:
        verdicts = {}
        for name in names or [""]:
            file = Path(folder, f"{name}.json")
            now = replace(settings, target=name, out=str(file))
            if not _verify_as_threads(now):
                launch_ranks(verify_rank, now)
            verdicts[name] = Verdict(*json.loads(file.read_text()))
    if len(verdicts) < 2:
        return next(iter(verdicts.values()))
    ok = all(verdict.ok for verdict in verdicts.values())
    if not settings.as_json:
        return Verdict(ok, "\n".join(verdict.report for verdict in verdicts.values()))
    found = {name: json.loads(verdict.report) for name, verdict in verdicts.items()}
    return Verdict(ok, json.dumps({"ok": ok, **found}))


def _verify_as_threads(settings: VerifySettings) -> bool:
    """Verify with a thread of this process per rank. Return False if that fails; processes then report the error."""
    if settings.target or settings.processes or settings.device != "cpu":
        return False
    try:
        reports = run_as_threads(lambda: _rank_report(settings), settings.world_size)
    except Exception as err:
        get_logger().debug("verify: ranks become processes, as threads fail: %s", err)
        return False
    _write(reports[0], settings)
    return True


def verify_rank(settings: Settings) -> None:
    """Verify as one rank of a world that the environment describes."""
    assert isinstance(settings, VerifySettings)
    with process_group(settings):
        report = _rank_report(settings)
    if os.environ["RANK"] == "0":
        _write(report, settings)


def _write(report: Report, settings: VerifySettings) -> None:
    verdict = Verdict(report.ok, report.as_json() if settings.as_json else str(report))
    Path(settings.out).write_text(json.dumps(verdict))
    torch.save(report.trained, f"{settings.out}.trained")


def _rank_report(settings: VerifySettings) -> Report:
    """Return the report of a rank of the default process group."""
    mesh = init_device_mesh(settings.device, (settings.pp, settings.dp, settings.tp), mesh_dim_names=AXES)
    set_random_seed(settings.seed, tp_rank=mesh["tp"].get_local_rank())
    model = build_model(settings).to(settings.device, torch.float32 if settings.target else DTYPES[settings.dtype])
    generator = torch.Generator().manual_seed(settings.seed)
    ids = torch.randint(VOCABULARY, (settings.batch, settings.seq), generator=generator).to(settings.device)
    return _report(model, {"input_ids": ids, "labels": ids}, settings, mesh)


def _report(model: nn.Module, batch: dict[str, torch.Tensor], settings: VerifySettings, mesh: DeviceMesh) -> Report:
    if not settings.target:
        return verify(model, schedule_model(copy.deepcopy(model), settings, mesh), batch, settings.level)
    options = {name: value for name, value in engine_options(settings).items() if name != "record_timeline"}
    if settings.clip:
        options["clip"] = settings.clip
    earlier = Path(settings.out).with_name(f"{settings.against}.json.trained")
    against: TrainingResults | None = None
    if settings.against and settings.target != settings.against:
        against = torch.load(earlier, weights_only=False, map_location=settings.device)  # safe to unpickle: this run wrote it
    schedule = partial(schedule_model, settings=settings, mesh=mesh)
    return verify_engine(model, schedule, batch, settings.target, against=against, **options)
