"""Schedules on two ranks that were given no mesh, as the classic scripts have none: what they are built on, and the losses."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo
from slapo_testing import run_distributed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.fc2(torch.relu(self.fc1(x)))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Block(), Block(), Block()]), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": (self.head(x) - y).square().mean()}


def sharded(sch: slapo.Schedule) -> None:
    for layer in sch.select("layers.*"):
        layer["fc1"].shard("weight", axis=0)
        layer["fc1"].sync("bwd_post", "all_reduce")
        layer["fc2"].shard("weight", axis=1)
        layer["fc2"].sync("fwd_post", "all_reduce")


def cut(sch: slapo.Schedule, *numbers: int) -> None:
    for number in numbers or (1,):
        sch[f"layers.{number}"].cut_pipeline_stage()


KINDS: dict[str, tuple[Any, tuple[int, int, int]]] = {
    "as it is": (lambda sch: None, (1, 2, 1)),
    "sharded": (sharded, (1, 1, 2)),
    "cut": (cut, (2, 1, 1)),
}


def train(rank: int, target: str) -> None:
    torch.manual_seed(0)
    reference = Model()
    x, y = torch.randn(4, 8), torch.randn(4, 4)
    for schedule, shape in KINDS.values():
        sch = slapo.create_schedule(copy.deepcopy(reference), example_inputs={"x": x[:2], "y": y[:2]})
        schedule(sch)
        engine = slapo.build(sch, target, optimizer=partial(torch.optim.SGD, lr=0.1), microbatches=2)
        assert tuple(sch.mesh.shape) == shape  # type: ignore[union-attr]
        own = {"x": x.chunk(2)[rank], "y": y.chunk(2)[rank]} if shape[1] == 2 else {"x": x, "y": y}
        losses = [float(engine.train_batch(**own)) for _ in range(2)]
        engine.close()
        plain = copy.deepcopy(reference)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        expected = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = plain(x, y)["loss"]
            loss.backward()
            optimizer.step()
            expected.append(float(loss))
        torch.testing.assert_close(losses, expected)


@pytest.mark.sampled(1)
@pytest.mark.multiproc
@pytest.mark.parametrize("target", ["torch", "deepspeed", "megatron"])
def test_the_losses_are_those_of_the_unmodified_model(target: str) -> None:
    run_distributed(train, 2, target, timeout=100)


def odd(rank: int) -> list[str]:
    told = []
    sch = slapo.create_schedule(Model(), example_inputs={"x": torch.randn(2, 8), "y": torch.randn(2, 4)})
    for options in ({"fsdp_units": 3}, {}):
        cut(sch, *(() if options else (0,)))
        with pytest.raises(slapo.BuildError) as caught:
            slapo.build(sch, "torch", optimizer=torch.optim.SGD, **options)
        told.append(str(caught.value))
        assert sch.mesh is None
        assert sch.group is dist.group.WORLD
    slapo.build(sch)
    assert sch.mesh is None
    return told


@pytest.mark.multiproc
def test_where_the_numbers_do_not_fit_or_the_build_fails_there_is_none() -> None:
    first, second = run_distributed(odd, 2, timeout=60)
    assert first == second
    assert "3 stages, but the schedule has no mesh; give create_schedule mesh= with an axis pp" in first[1]
