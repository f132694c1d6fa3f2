"""Preflight check, before any process starts: schedule and partition the model without weights on a fake world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slapo_core import build_program, default_registry, init_empty_weights, set_random_seed

from ..run_data.settings import Settings, engine_options
from .corpus import read_corpus
from .model_folder import folder_weights
from .models import build_model
from .reference import make_optimizer
from .run_schedule import schedule_model

AXES = ("pp", "dp", "tp")

COMMON_OPTIONS = ("microbatches", "precision")
"""Options that every target has; plugins see only the others, as in ``slapo.build``."""


def check_run(settings: Settings, trains: bool = True, reads: bool = True) -> None:
    """Do the work of a rank up to the weights, to find errors of data, model, schedule and target.

    Args:
        settings: Settings of the run.
        trains: Whether the target's engine will run the stages; else only the schedule is checked.
        reads: Whether the run reads data files.

    Raises:
        SlapoError: the error with which a rank would fail.
    """
    dialect = default_registry().get("dialect", settings.target)
    if trains and reads:
        read_corpus(settings)
        folder_weights(settings)
    with init_empty_weights():
        model = build_model(settings)
    # tracing runs the model once, and dropout in a sharded region draws from a state that has to be there
    set_random_seed(settings.seed, dp_rank=0, pp_rank=0, tp_rank=0)
    with _fake_mesh(settings) as mesh:
        sch = schedule_model(model, settings, mesh)
        config = engine_options(settings)
        common = {name: config.pop(name) for name in COMMON_OPTIONS if name in config}
        default_registry().hook.slapo_before_build(schedule=sch, target=settings.target, config=config)
        program = build_program(sch)
        if trains:
            dialect.check(program, optimizer=make_optimizer(settings), **common, **config)


@contextmanager
def _fake_mesh(settings: Settings) -> Iterator[DeviceMesh]:
    """The run's mesh as rank 0 would see it; its collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=settings.world_size)
    try:
        yield init_device_mesh("cpu", (settings.pp, settings.dp, settings.tp), mesh_dim_names=AXES)
    finally:
        dist.destroy_process_group()
