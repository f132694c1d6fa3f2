"""``slapo verify`` from the user's side, and what each of its ranks does."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh

from slapo_core.random import set_random_seed
from slapo_verify import verify

from .launch import launch
from .models import build_model
from .rehearsal import AXES, rehearse
from .run import device_of
from .schedules import schedule_model
from .settings import VOCABULARY, Settings
from .worker import joined

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class VerifySettings(Settings):
    """The flags of ``slapo verify``, those of the model as for ``slapo train``.

    Args:
        level: What ``slapo.verify`` compares.
        dtype: Type of the parameters, a key of ``DTYPES``.
        as_json: Whether the report is made as data.
        out: File that rank 0 writes the report to.
    """

    level: str = "grads"
    dtype: str = "fp32"
    as_json: bool = False
    out: str = ""


class Verdict(NamedTuple):
    """What a verification came to.

    Args:
        ok: Whether all is the same.
        report: The report as text, or as data.
    """

    ok: bool
    report: str


def run(settings: VerifySettings) -> Verdict:
    """Verify as the settings say, on ranks of this machine.

    Raises:
        SlapoError: a mistake found before any rank was started; ``RankError`` when a rank failed; ``InterruptedRunError`` when
            a signal ended the run.
    """
    settings = replace(settings, device=device_of(settings))
    rehearse(settings, trains=False)
    with tempfile.TemporaryDirectory(prefix="slapo-") as folder:
        file = Path(folder, "verdict.json")
        launch(work, replace(settings, out=str(file)))
        return Verdict(*json.loads(file.read_text()))


def work(settings: Settings) -> None:
    """Verify as one rank of a world that the environment describes."""
    assert isinstance(settings, VerifySettings)
    with joined(settings):
        mesh = init_device_mesh(settings.device, (settings.pp, settings.dp, settings.tp), mesh_dim_names=AXES)
        set_random_seed(settings.seed, tp_rank=mesh["tp"].get_local_rank())
        model = build_model(settings).to(settings.device, DTYPES[settings.dtype])
        generator = torch.Generator().manual_seed(settings.seed)
        ids = torch.randint(VOCABULARY, (settings.batch, settings.seq), generator=generator).to(settings.device)
        sch = schedule_model(copy.deepcopy(model), settings, mesh)
        report = verify(model, sch, {"input_ids": ids, "labels": ids}, settings.level)
    if os.environ["RANK"] == "0":
        verdict = Verdict(report.ok, report.as_json() if settings.as_json else str(report))
        Path(settings.out).write_text(json.dumps(verdict))
