"""Run of ``slapo train``: choose the device, check the settings, then start the ranks or join those of torchrun."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from slapo_core import SlapoError
from slapo_report import format_count

from ..launch.elastic_launch import launch_ranks
from ..launch.errors import RankError
from ..run_data.settings import Settings, SettingsError
from .preflight_check import check_run
from .worker import train_rank


def run_training(settings: Settings) -> None:
    """Train as the settings say; returns when all ranks have ended well.

    Raises:
        SlapoError: a mistake found before any rank was started; ``RankError`` when a rank failed;
            ``InterruptedRunError`` when a signal ended the run.
    """
    settings = replace(settings, device=resolve_device(settings))
    if "RANK" in os.environ:
        _check_world(settings, int(os.environ["WORLD_SIZE"]))
        if os.environ["RANK"] == "0":  # which writes the report; the others may be on machines where that cannot be
            make_folder(settings)
        try:
            train_rank(settings)
        except SlapoError as err:
            raise RankError(f"rank {os.environ['RANK']}: {err}") from err
    else:
        check_run(settings)
        make_folder(settings)
        launch_ranks(train_rank, settings)


def resolve_device(settings: Settings) -> str:
    """Return ``cpu`` or ``cuda``; ``auto`` takes GPUs if there is one per rank of this machine."""
    num_gpus = torch.cuda.device_count()
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", settings.world_size))
    if settings.device == "cuda" and num_gpus < num_ranks:
        ranks, gpus = format_count(num_ranks, "rank"), format_count(num_gpus, "GPU")
        raise SettingsError(f"--device cuda: {ranks}, but {gpus}; use fewer ranks or --device cpu")
    if settings.device == "auto":
        return "cuda" if num_gpus >= num_ranks else "cpu"
    return settings.device


def _check_world(settings: Settings, world_size: int) -> None:
    if world_size != settings.world_size:
        raise SettingsError(
            f"--pp {settings.pp} x --dp {settings.dp} x --tp {settings.tp} is {settings.world_size} ranks, but torchrun "
            f"started {world_size}; start {settings.world_size}, or choose sizes whose product is {world_size}"
        )


def make_folder(settings: Settings) -> None:
    """Make the folder of ``--report``, if one was asked for, and try to write there: a run must not end in vain.

    Raises:
        SettingsError: it cannot be made or written to.
    """
    if not settings.report:
        return
    folder = Path(settings.report)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as err:
        raise SettingsError(
            f"--report {folder}: cannot be written to, {(err.strerror or str(err)).lower()}; give a folder that can be"
        ) from err
