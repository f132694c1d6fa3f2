"""Checkpoints at another layout, of every kind of optimizer and of ZeRO's ways to keep its states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slapo_core.build import build
from slapo_core.testing import run_distributed
from tests.engine_models import batches, halved, my_part, small, two_groups
from tests.engines import scheduled
from tests.slapo_torch.layouts import mesh_of, put_together

from .counting import count_again

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
Layout = dict[str, int]
Side = tuple[Layout, dict[str, Any]]
"""A layout, and what to build with."""


@pytest.fixture(scope="module", autouse=True)
def _counters() -> Iterator[None]:
    """The processes go on to tests of other files."""
    yield
    run_distributed(count_again, 4)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3, centered=True, momentum=0.5)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=1e-2, eps=1e-3)


def amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, amsgrad=True)


def asgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.ASGD(parameters, lr=1e-2)


def options(stage: int, zero: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    """Of DeepSpeed's config."""
    return {"config": {"zero_optimization": {"stage": stage, **(zero or {})}, **config}}


def engine_of(side: Side, optimizer: Any) -> tuple[Any, Any]:
    """GPT-2, and its mesh."""
    count_again(dist.get_rank())
    layout, given = side
    mesh = mesh_of(**layout)
    schedule = scheduled(small("gpt2"), mesh, my_part(batches(2)[0], mesh))
    common: dict[str, Any] = {"microbatches": 2, "clip": 0.1}
    if optimizer is not None:
        # for Adagrad ZeRO makes another one, which no schedule knows
        common |= {"optimizer": optimizer, "lr_scheduler": None if optimizer is adagrad else halved}
    return build(schedule, "deepspeed", **common, **given), mesh


def losses(engine: Any, mesh: Any, steps: range) -> list[float]:
    return [engine.train_batch(**my_part(batches(2)[step], mesh)).item() for step in steps]


def saved(rank: int, side: Side, optimizer: Any, folder: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps behind some and a save, and the weights then."""
    engine, mesh = engine_of(side, optimizer)
    losses(engine, mesh, range(steps))
    engine.save(folder)
    found = losses(engine, mesh, range(steps, 5))
    weights = put_together(engine, mesh)
    engine.close()
    return found, weights


def resumed(rank: int, side: Side, optimizer: Any, folder: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Those of an engine that trained on something else and then loaded it, saved it again, and loaded that."""
    engine, mesh = engine_of(side, optimizer)
    losses(engine, mesh, range(4, 5))
    engine.load(folder)
    engine.save(f"{folder}/again")
    losses(engine, mesh, range(steps, 5))
    engine.load(f"{folder}/again")
    found = losses(engine, mesh, range(steps, 5))
    weights = put_together(engine, mesh)
    engine.close()
    return found, weights


def check(one: Side, other: Side, optimizer: Any, folder: str, steps: int = 2, near: float = 2e-5) -> None:
    expected, weights = run_distributed(saved, math.prod(one[0].values()), one, optimizer, folder, steps, timeout=110)[0]
    for found, own in run_distributed(resumed, math.prod(other[0].values()), other, optimizer, folder, steps, timeout=110):
        assert found == pytest.approx(expected, abs=near)
        assert own.keys() == weights.keys()
        assert max(float((own[name] - weights[name]).abs().max()) for name in own) < near


@pytest.mark.parametrize("optimizer", [sgd, rmsprop, adagrad, amsgrad, asgd], ids=lambda each: each.__name__)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (({"tp": 2}, options(0)), ({"dp": 2}, options(2))),
        (({"dp": 2}, options(3)), ({"pp": 2}, options(1))),
        (({"pp": 2}, options(0)), ({}, options(3))),
        (({"dp": 2}, options(1)), ({"tp": 2}, options(0))),
    ],
    ids=["0 to 2", "3 to 1", "0 to 3", "1 to 0"],
)
def test_every_optimizer_goes_on(one: Side, other: Side, optimizer: Any, tmp_path: Path) -> None:
    check(one, other, optimizer, str(tmp_path))


IN_CPU = {"offload_optimizer": {"device": "cpu"}}
FORCED = {"zero_force_ds_cpu_optimizer": False}
KINDS: dict[str, tuple[Side, Side]] = {
    "offloaded 2 to 0": (({"dp": 2}, options(2, IN_CPU, **FORCED)), ({"tp": 2}, options(0))),
    "0 to offloaded 2": (({"tp": 2}, options(0)), ({"dp": 2}, options(2, IN_CPU, **FORCED))),
    "offloaded 3 to 1": (({"dp": 2}, options(3, IN_CPU, **FORCED)), ({"pp": 2}, options(1))),
    "1 to offloaded 3": (({"pp": 2}, options(1)), ({"dp": 2}, options(3, IN_CPU, **FORCED))),
    "small sub-groups": (({"dp": 2}, options(3, {"sub_group_size": 3000})), ({}, options(3, {"sub_group_size": 900}))),
    "sub-groups to 2": (({}, options(3, {"sub_group_size": 900})), ({"dp": 2}, options(2))),
    "dealt in turns": (({"dp": 2}, options(2, {"round_robin_gradients": True})), ({"tp": 2}, options(1))),
    "to dealt in turns": (({"tp": 2}, options(1)), ({"dp": 2}, options(2, {"round_robin_gradients": True}))),
    "elastic": (({"dp": 2}, options(1, {"elastic_checkpoint": True})), ({"pp": 2}, options(1))),
    "four replicas": (({"dp": 4}, options(3)), ({"dp": 2, "tp": 2}, options(2))),
    "to four replicas": (({"dp": 2, "tp": 2}, options(3)), ({"dp": 4}, options(1))),
    "replicated pipeline": (({"pp": 2, "dp": 2}, options(1)), ({"dp": 2, "tp": 2}, options(3))),
    "to a replicated pipeline": (({"dp": 2, "tp": 2}, options(1)), ({"pp": 2, "dp": 2}, options(0))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [2, 0])
def test_every_way_to_keep_states(kind: str, steps: int, tmp_path: Path) -> None:
    check(*KINDS[kind], two_groups, str(tmp_path), steps)
