"""An error on one tensor-parallel rank ends the step on all, although the others wait for it in a collective."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_testing import run_distributed
from slapo_torch.step import tensor_parallel_failures

from ..layouts import adamw, mesh_of, message_of

pytestmark = pytest.mark.multiproc

X = torch.ones(2, 4)


class Fails(nn.Module):
    """Fails between two layers, at once or late, with a message of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.message, self.delay = "", 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        time.sleep(self.delay)
        if self.message:
            raise ValueError(self.message)
        return self.down(x).pow(2).mean()


def _engine() -> tuple[Any, Fails]:
    model = Fails()
    sch = create_schedule(
        model,
        mesh=mesh_of(tp=2),
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin, slapo_torch.plugin]),
    )
    sch.tensor_parallel({"up": "colwise", "down": "rowwise"})
    return build(sch, "torch", optimizer=adamw), model


def _all_fail(rank: int) -> str:
    engine, model = _engine()
    model.message = f"on {rank}"
    message = message_of(lambda: engine.train_batch(x=X))
    model.message = ""
    assert engine.train_batch(x=X) > 0
    return message


def test_where_all_fail_each_has_its_error_and_the_engine_goes_on() -> None:
    assert run_distributed(_all_fail, 2) == ["ValueError: on 0", "ValueError: on 1"]


def _one_fails(rank: int) -> list[str]:
    """Rank 0 is in the forward still when rank 1 leaves, and fails there, as a collective does whose peer has gone."""
    tensor_parallel_failures.GRACE = timedelta(seconds=0.2)
    engine, model = _engine()
    engine.train_batch(x=X)
    model.message, model.delay = (("only here", 0.0), ("connection closed by peer", 2.0))[rank == 0]
    return [message_of(lambda: engine.train_batch(x=X)) for _ in range(2)]


def test_where_one_fails_it_leaves_and_the_others_say_why() -> None:
    waiting, left = run_distributed(_one_fails, 2)
    again = "BuildError: the tensor-parallel ranks are out of step since an error on one of them; start the processes again"
    assert left == ["ValueError: only here", again]
    assert waiting == ["BuildError: rank 1 failed: ValueError: only here", again]
